"""Support for libraries of models and training loops, a module each. None is imported before it is asked for."""
