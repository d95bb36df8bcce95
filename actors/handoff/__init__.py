"""Weights from the learner's devices into engines, piece by piece, without a whole copy anywhere on the way.

One hand-off: the learner's ranks gather parameter by parameter, in step, into two staged pieces of the flat buffer that
a manifest would describe (`models.pieces`). An engine on a GPU that a rank has too copies each piece from that rank's
memory (`window`: CUDA IPC); all others get it by broadcast from rank 0 (`group`: NCCL, on CPUs gloo). They find each
other, and say how far they are, through keys in rank 0's store (`board`). Every wait is bounded, nobody waits for one
that is late or gone, and what breaks is an answer: whoever did not get everything takes the whole buffer from the
object store instead. No Ray in here, and no decision about when, to whom, or what then.
"""
