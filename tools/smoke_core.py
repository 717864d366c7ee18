"""What a user with neither framework has. Writes a tape to the file it is given."""

import sys

from roundpipe_core import PhaseError, Tape, diff, doing_recompute, get_recompute_data, save_for_recompute

kept: tuple[list[int]] = save_for_recompute([1, 2])  # outside of a region the arguments come back
if doing_recompute() or kept != ([1, 2],):
    sys.exit(f"save_for_recompute gave {kept}")
try:
    get_recompute_data()
except PhaseError:
    pass
else:
    sys.exit("get_recompute_data gave something outside of a recompute")

routing = [[[0, 3], [1, 2]], [[2, 0], [3, 1]]]  # two tokens, two layers, two experts each
tape: Tape = Tape.from_routing(routing, experts=4, layers=["block 0", "block 1"])
tape.save(sys.argv[1])
if diff(tape, Tape.load(sys.argv[1])):
    sys.exit("the tape came back otherwise")
