"""Send weights from the learner's devices to engines, piece by piece, without a whole copy on the way.

In one hand-off, the learner's ranks gather parameter by parameter, in step, into two staging pieces of the flat buffer
(`models.pieces`). An engine that shares a GPU with a rank copies each piece from that rank's memory (`window`: CUDA
IPC). All others receive it by broadcast from rank 0 (`group`: NCCL, on CPUs gloo). Sender and receivers find each other
and report progress through keys in rank 0's store (`board`). Every wait is bounded, and late or lost members are left
behind. Failures are results, not exceptions: a receiver without all pieces loads the whole buffer from the object store
instead. No Ray in here; the caller decides when, to whom, and what follows a failure.
"""
