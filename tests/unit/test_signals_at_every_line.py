"""A signal's handler that raises at any line of ours: what it raises comes out, and nothing is blamed for it."""

import gc
import itertools
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import statetree as st
from statetree import errors

pytestmark = pytest.mark.usefixtures("one_rank_group")

HERE = str(Path(st.__file__).parent)
#: Python tells nobody what is raised as an object is freed; and keys are given texts below all else (limits.md).
LOST = {"__del__", "render_key", "exactly", "key_identity"}
#: What is under way then is what Python's ``zipfile`` takes for the end of a file.
IN_ZIPFILE = {"seek", "readinto"}


class Late(Exception):
    """What a handler raises."""


class LateForIO(TimeoutError):
    """The same. It is an ``OSError``, as those of disks are."""


class LateValue(ValueError):
    """The same."""


class LateRuntime(RuntimeError):
    """The same. Torch raises such errors."""


KINDS = [Late, LateForIO, LateValue, LateRuntime]


def state(step):
    kept = {"w": torch.full((4,), float(step)), "step": step, "set": {1, step}, "pair": (1, "a", [2.0, None])}
    return {**kept, "sparse": torch.eye(2).to_sparse(), "o": torch.optim.SGD([torch.ones(2)], lr=0.1).state_dict()}


def tensors():
    return {f"p{index}": torch.arange(6.0).reshape(2, 3) + index for index in range(3)}


def restoring(folder, **options):
    """Two steps are there. The older one is never what comes back."""
    checkpointer = st.Checkpointer(folder)
    for step in (1, 2):
        checkpointer.save(step, state(step))

    def restore():
        assert checkpointer.restore(state(0), fallback=True, **options)["step"] == 2

    return restore


def saving_steps(folder):
    checkpointer, steps = st.Checkpointer(folder, keep=2), itertools.count()
    return lambda: checkpointer.save(next(steps), state(0))


def loading(folder, name, tree, *like):
    st.save(tree, folder / name)
    return lambda: st.load(folder / name, *like)


def saving(folder, name, tree):
    numbers = itertools.count()
    return lambda: st.save(tree, folder / f"{next(numbers)}{name}")


def staging():
    with st.Stager() as stager:
        stager.stage(state(1))


def collective(verb):
    """Make a call that is recognised from the second time on."""
    mesh = init_device_mesh("cpu", (1,))
    tree = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in tensors().items()}

    def call():
        for _ in range(3):
            verb(tree)

    return call


ACTIONS = {
    "gather": lambda _: collective(st.gather),
    "reshard": lambda _: collective(lambda tree: st.reshard(tree, tree)),
    "restore": restoring,
    "restore pickles": lambda folder: restoring(folder, weights_only=False),
    "save a step": saving_steps,
    "load a directory": lambda folder: loading(folder, "a", state(1)),
    "load a directory like another": lambda folder: loading(folder, "a", state(1), state(0)),
    "load torch's format": lambda folder: loading(folder, "a.pt", state(1)),
    "load safetensors": lambda folder: loading(folder, "a.safetensors", tensors()),
    "load safetensors like another": lambda folder: loading(folder, "a.safetensors", tensors(), tensors()),
    "save a directory": lambda folder: saving(folder, "", state(1)),
    "save torch's format": lambda folder: saving(folder, ".pt", state(1)),
    "save safetensors": lambda folder: saving(folder, ".safetensors", tensors()),
    "stage": lambda _: staging,
    "similarity": lambda _: lambda: st.similarity(state(1), state(1)),
    "copy_into": lambda _: lambda: st.copy_into(tensors(), tensors()),
    "offload": lambda _: lambda: st.offload(state(1)),
    "digest": lambda _: lambda: st.digest(state(1)),
    "delta": lambda _: lambda: st.delta(state(1), state(1)),
}


class Ringing:
    """While it is open, calls a function once, before a line of ours; without one, notes which lines there are.

    The garbage collector waits meanwhile: nobody is told what is raised in the functions that it calls.
    """

    def __init__(self, place=None, ring=None):
        self.place, self.ring, self.places = place, ring, {}

    def _line(self, frame, event, _about):
        place = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        if event == "line" and place[2] not in LOST:
            self.places[place] = None
            if place == self.place and self.ring is not None:
                ring, self.ring = self.ring, None
                ring()
        return self._line

    def _call(self, frame, _event, _about):
        return self._line if frame.f_code.co_filename.startswith(HERE) else None

    def __enter__(self):
        gc.disable()
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)
        gc.enable()


def lost(action, places, kind):
    """Return the lines at which a handler raises such an error, and another or none comes out."""
    found, raised = [], []

    def ring(_number, _frame):
        raised.append(kind("late"))
        raise raised[-1]

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for place in places:
            raised.clear()
            caught = None
            try:
                with Ringing(place, lambda: signal.raise_signal(signal.SIGALRM)):
                    action()
            except Exception as error:
                caught = error
            if caught is not (raised[0] if raised else None):
                found.append((*place, repr(caught)))
            # Only a tracer raises at the line of a `try`: Python's tables have it outside of each `finally`.
            errors._LATER.checks = None
    finally:
        signal.signal(signal.SIGALRM, before)
        raised.clear()  # whose tracebacks hold what was interrupted, locks too
        caught = None
    return found


def every_line(action):
    with Ringing() as ringing:
        action()
    return list(ringing.places)


def check(name, folder, kinds, share):
    """Check each kind of error at every so-many-th line, beginning with another one for each."""
    action = ACTIONS[name](folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        action()  # what is imported and remembered is
        places = every_line(action)
        assert len(places) > 10
        for first, kind in enumerate(kinds):
            chosen = places[first * share // len(kinds) :: share]
            if issubclass(kind, OSError):
                chosen = [place for place in chosen if place[2] not in IN_ZIPFILE]
            assert lost(action, chosen, kind) == []


@pytest.mark.parametrize("name", ACTIONS)
def test_it_comes_out_at_some_lines(name, tmp_path):
    check(name, tmp_path, KINDS, share=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIONS)
def test_it_comes_out_at_every_line(name, tmp_path):
    """Each line is interrupted once, by one of the kinds of errors."""
    check(name, tmp_path, KINDS, share=len(KINDS))


def test_a_line_at_which_it_is_lost_is_found():
    def suppressing():
        try:
            st.offload(tensors())
        except LateValue:
            return

    assert lost(suppressing, every_line(suppressing)[:3], LateValue)
    assert lost(suppressing, every_line(suppressing)[:3], Late) == []
