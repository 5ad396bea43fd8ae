"""One consistent loss scale and one skip decision across all ranks."""

from distscale.connect import init_distributed as init_distributed
from distscale.errors import ConfigError as ConfigError
from distscale.errors import DesyncError as DesyncError
from distscale.errors import DistScaleError as DistScaleError
from distscale.errors import ProtocolError as ProtocolError
from distscale.errors import ScaleExhaustedError as ScaleExhaustedError
from distscale.policy import DynamicScale as DynamicScale
from distscale.policy import NoScaling as NoScaling
from distscale.policy import Policy as Policy
from distscale.policy import StaticScale as StaticScale
from distscale.record import Culprit as Culprit
from distscale.record import JsonlRecord as JsonlRecord
from distscale.record import StepReport as StepReport
from distscale.reducers import LocalReducer as LocalReducer
from distscale.reducers import ProcessGroupReducer as ProcessGroupReducer
from distscale.reducers import Reducer as Reducer
from distscale.scaler import DistributedGradScaler as DistributedGradScaler

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Imported when asked for: they are of no use to others.
    if name == "deepspeed_initialize":
        from distscale.integrations.deepspeed import deepspeed_initialize

        return deepspeed_initialize
    if name == "MpiReducer":
        from distscale.mpi import MpiReducer

        return MpiReducer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
