# SPDX-License-Identifier: Apache-2.0
"""kvstrata: keys and values of language models in a daemon's memory.

    session     attach, models, sequences, steps (ctypes over libkvstrata; torch, numpy, DLPack; no copies)
    attachment  an adapter's session, attached anew once the daemon has gone or has not answered
    epoch       what an engine's keys belong to: an identity, and the last reset
    daemon      starts a private kvstratad and stops it
    grpc        the daemon's gRPC services (needs grpcio); for tools
    errors      one exception class for each code
"""

from .errors import (Aborted, AlreadyExists, DataLoss, DeadlineExceeded, FailedPrecondition, Internal,
                     InvalidArgument, KvstrataError, NotFound, OutOfRange, PermissionDenied,
                     ResourceExhausted, Unauthenticated, Unavailable, Unimplemented)
from .session import (Built, Capacity, Held, Model, Need, PageTableEntry, PlanNeeds, PoolCapacity, Room, Sequence,
                      Session, Step, attach)
from .tensors import BlockTensor, DType, MemoryHandle, MemoryKind

__version__ = "0.1.0"
__all__ = ["Aborted", "AlreadyExists", "BlockTensor", "Built", "Capacity", "DType", "DataLoss", "DeadlineExceeded",
           "FailedPrecondition", "Held", "Internal", "InvalidArgument", "KvstrataError", "MemoryHandle", "MemoryKind",
           "Model", "Need", "NotFound", "OutOfRange", "PageTableEntry", "PermissionDenied", "PlanNeeds", "PoolCapacity",
           "ResourceExhausted", "Room", "Sequence", "Session", "Step", "Unauthenticated", "Unavailable",
           "Unimplemented", "attach"]
