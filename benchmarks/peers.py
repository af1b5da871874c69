"""What PyTorch's users call today. The names are private, and imported here alone: tried with torch 2.13."""

from torch import _foreach_clone as foreach_clone
from torch import _foreach_copy_ as foreach_copy_
from torch.distributed._state_dict_utils import (
    _check_state_dict_similarity as check_state_dict_similarity,
)
from torch.distributed._state_dict_utils import (
    _copy_state_dict as copy_state_dict,
)
from torch.distributed._state_dict_utils import (
    _create_cpu_state_dict as create_cpu_state_dict,
)
from torch.distributed._state_dict_utils import (
    _flatten_state_dict as flatten_state_dict,
)
from torch.distributed._state_dict_utils import (
    _unflatten_state_dict as unflatten_state_dict,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._pytree import tree_flatten as pytree_flatten
from torch.utils._pytree import tree_unflatten as pytree_unflatten

__all__ = [
    "StateDictStager",
    "check_state_dict_similarity",
    "copy_state_dict",
    "create_cpu_state_dict",
    "flatten_state_dict",
    "foreach_clone",
    "foreach_copy_",
    "pytree_flatten",
    "pytree_unflatten",
    "unflatten_state_dict",
]
