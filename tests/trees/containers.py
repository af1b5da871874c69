"""Trees of dicts, lists, tuples and deques, of what derives from them, and of great depth and width."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple, NoReturn

import torch

import statetree as st
from tests.trees.corpus import A_LAMBDA, Color, Ramp, a_function, refuse, tree
from tests.trees.fields import Empty, Frozen


class DictWithoutArguments(dict):
    def __init__(self) -> None:
        super().__init__()


class DictWithRequiredArguments(dict):
    def __init__(self, required: int) -> None:
        super().__init__()
        self.required = required


class HostileDict(dict):
    """Made through ``dict`` itself only: everything else raises."""

    __init__ = __setitem__ = __getitem__ = __iter__ = __len__ = __contains__ = __setattr__ = __reversed__ = refuse
    items = keys = values = get = update = setdefault = pop = copy = __eq__ = __or__ = __ior__ = refuse
    __hash__ = None


class HostileOrderedDict(OrderedDict):
    __init__ = __setitem__ = __getitem__ = __iter__ = __len__ = __contains__ = __setattr__ = __reversed__ = refuse
    items = keys = values = get = update = setdefault = pop = copy = move_to_end = __eq__ = refuse
    __hash__ = None


class HostileDefaultDict(defaultdict):
    __init__ = __setitem__ = __getitem__ = __iter__ = __len__ = __contains__ = __setattr__ = refuse
    items = keys = values = get = update = setdefault = pop = copy = __missing__ = __eq__ = refuse
    __hash__ = None


class HostileList(list):
    __init__ = __setitem__ = __getitem__ = __iter__ = __len__ = __contains__ = __setattr__ = refuse
    append = extend = insert = pop = copy = __eq__ = __iadd__ = __bool__ = refuse
    __hash__ = None


class HostileTuple(tuple):
    __new__ = __init__ = __getitem__ = __iter__ = __len__ = __contains__ = __setattr__ = __eq__ = __bool__ = refuse
    __hash__ = None


class HostileDeque(deque):
    __init__ = __setitem__ = __getitem__ = __iter__ = __len__ = __setattr__ = append = extend = __eq__ = refuse
    maxlen = property(refuse)
    __hash__ = None


class ListWithSlots(list):
    __slots__ = ("__private", "extra", "unset")

    def hide(self, value: Any) -> None:
        self.__private = value


class ListWithSlotsAndMore(ListWithSlots):
    __slots__ = ("more",)


class ListWithAttributes(list):
    pass


class DictWithAttributes(dict):
    pass


class AttrDict(dict):
    """Its items are its attributes, as in many classes for configurations."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.__dict__ = self


class TupleWithAttributes(tuple):
    pass


class DequeWithAttributes(deque):
    pass


class CountingUp(Counter):
    pass


Point = namedtuple("Point", ["x", "y"])


class TypedPoint(NamedTuple):
    x: Any
    y: Any = None


class PointWithAttributes(Point):
    """Its constructor takes other arguments than its fields, and it has a ``__dict__``."""

    def __new__(cls, both: Any) -> PointWithAttributes:
        return super().__new__(cls, both, both)


class BarePoint(Point):
    __slots__ = ()


class ModelOutput(OrderedDict):
    """As transformers' class of this name: fields of a dataclass that are items of a mapping as well."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __delitem__(self, *args: Any) -> NoReturn:
        refuse()

    def setdefault(self, *args: Any) -> NoReturn:
        refuse()

    def pop(self, *args: Any) -> NoReturn:
        refuse()

    def update(self, *args: Any) -> NoReturn:
        refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass
class MaskedOutput(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden: Any = None


@tree()
def a_leaf(new: Ramp) -> Any:
    return new(2, 3)


@tree()
def none(new: Ramp) -> Any:
    return None


@tree()
def empty_dict(new: Ramp) -> Any:
    return {}


@tree()
def empty_list(new: Ramp) -> Any:
    return []


@tree()
def empty_tuple(new: Ramp) -> Any:
    return ()


@tree()
def empty_containers(new: Ramp) -> Any:
    return {
        "dict": {},
        "list": [],
        "tuple": (),
        "deque": deque(),
        "bounded": deque(maxlen=0),
        "ordered": OrderedDict(),
        "default": defaultdict(list),
        "counter": Counter(),
        "hostile": dict.__new__(HostileDict),
        "typed": ListWithAttributes(),
        "deeper": [[], [{}], ((), [[]])],
        "frozen": Empty(),
    }


@tree()
def state_dict_like(new: Ramp) -> Any:
    return {
        "model": {"layers": [{"weight": new(2, 3), "bias": new(2)}, {"weight": new(3, 2), "bias": None}]},
        "optimizer": {"state": {0: {"step": 3, "exp_avg": new(2, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "step": 7,
    }


@tree()
def dict_order(new: Ramp) -> Any:
    return {"z": new(1), "a": new(2), "m": {"b": new(3), "a": new(4)}}


@tree()
def ordered_dict_with_metadata(new: Ramp) -> Any:
    result = OrderedDict([("weight", new(2)), ("bias", new(3))])
    result._metadata = OrderedDict([("", {"version": 1}), ("norm", {"version": 2, "tuple": (1, 2.0, None)})])
    result.another = "attribute"
    return {"model": result}


@tree()
def ordered_dict_moved(new: Ramp) -> Any:
    result = OrderedDict([("a", new(1)), ("b", new(1)), ("c", new(1))])
    result.move_to_end("a")  # changes the order of the OrderedDict alone, not that of the dict beneath
    return result


@tree()
def attributes_with_tensors(new: Ramp) -> Any:
    result = OrderedDict([("weight", new(2))])
    result._metadata = {"": {"version": 1}, "scale": new(1)}
    listed = ListWithAttributes([new(1), 2])
    listed.tensor, listed.plain, listed.nested = new(2), {"a": [1, (2.0, "x")]}, {"b": [new(1)], "a": 1}
    mapped = DictWithAttributes(tensor=new(1))
    mapped.tensor = new(2)  # an attribute of the same name as a key
    return [result, listed, mapped]


@tree()
def attributes_that_are_items(new: Ramp) -> Any:
    return {"config": AttrDict(weight=new(2), inner=AttrDict(rate=0.1, empty=AttrDict())), "same": AttrDict(a=new(1))}


@tree()
def attributes_of_attributes(new: Ramp) -> Any:
    inner, outer, plain = DictWithAttributes(a=1), ListWithAttributes([new(1)]), TupleWithAttributes((1, 2))
    inner.tensor = new(2)
    plain.flag = True
    outer.inner, outer.plain = inner, plain
    return {"outer": outer, "inner": [plain]}


@tree()
def attribute_values(new: Ramp) -> Any:
    result = DictWithAttributes()
    vars(result).update(
        {"nan": float("nan"), "zero": -0.0, "one": 1, "true": True, "function": a_function, "class": Color, "": [{}]}
    )
    return result


@tree()
def default_dicts(new: Ramp) -> Any:
    nested = defaultdict(A_LAMBDA, {"a": new(1)})
    return {"list": defaultdict(list, {"b": [new(1)]}), "none": defaultdict(None, a=1), "lambda": nested}


@tree()
def counters(new: Ramp) -> Any:
    typed = CountingUp("abca")
    typed.attribute = new(1)
    return {"plain": Counter({"b": 3, "a": 0, "c": -1}), "typed": typed}


@tree()
def dict_subclasses(new: Ramp) -> Any:
    first, second = DictWithoutArguments(), DictWithRequiredArguments(new.number())
    first["b"], first["a"], second["x"] = new(1), new(2), new(3)
    return [first, second]


def hostile_dict(cls: type, items: dict[Any, Any]) -> Any:
    base = OrderedDict if issubclass(cls, OrderedDict) else dict
    result = cls.__new__(cls)
    for key, value in items.items():
        base.__setitem__(result, key, value)
    return result


@tree()
def hostile_mappings(new: Ramp) -> Any:
    default = hostile_dict(HostileDefaultDict, {"b": new(1), "a": 2})
    defaultdict.default_factory.__set__(default, list)
    ordered = hostile_dict(HostileOrderedDict, {"b": new(1), "a": 2})
    vars(ordered)["attribute"] = [new(1)]
    return {"dict": hostile_dict(HostileDict, {"b": new(2), "a": {}}), "ordered": ordered, "default": default}


@tree()
def hostile_sequences(new: Ramp) -> Any:
    listed, queued = list.__new__(HostileList), deque.__new__(HostileDeque)
    list.extend(listed, [new(1), [new(2)]])
    deque.__init__(queued, [new(1), 2, 3], 3)
    vars(listed)["attribute"] = 1
    vars(queued)["attribute"] = new(1)
    return [listed, tuple.__new__(HostileTuple, (new(3), 2)), queued]


@tree()
def sequences_with_attributes(new: Ramp) -> Any:
    result = [ListWithAttributes([new(1)]), TupleWithAttributes((new(1), 2)), DequeWithAttributes([new(1), 3], 5)]
    for number, sequence in enumerate(result):
        sequence.tensor, sequence.number = new(2), number
    return result


@tree()
def slots(new: Ramp) -> Any:
    result = ListWithSlotsAndMore([new(1)])
    result.extra, result.more = new(2), "more"
    result.hide({"private": new(1)})
    return result


@tree()
def named_tuples(new: Ramp) -> Any:
    attributed = PointWithAttributes(new(1))
    attributed.tensor, attributed.note = new(2), "note"
    return [Point(new(1), 2), TypedPoint(new(2)), BarePoint(None, Point((), [])), attributed]


@tree()
def deques(new: Ramp) -> Any:
    return {"free": deque([new(1), new(2)]), "bounded": deque([1, new(1)], maxlen=2), "room": deque([3], maxlen=9)}


@tree()
def return_types(new: Ramp) -> Any:
    values = new(3, 2)
    return [torch.max(values, dim=0), torch.sort(values), torch.linalg.slogdet(new(2, 2)), torch.linalg.qr(new(3, 2))]


@tree()
def struct_sequences_of_python(new: Ramp) -> Any:
    return {"time": time.struct_time(range(9)), "beside": new(1)}


@tree()
def model_output(new: Ramp) -> Any:
    return {"out": MaskedOutput(loss=new(1), logits=new(2, 2))}


@tree()
def sizes_and_paths(new: Ramp) -> Any:
    return [torch.Size([2, 3]), st.Path(("a", 0)), (torch.Size([]), new(1))]


@tree()
def deep_lists(new: Ramp) -> Any:
    result: Any = new(1)
    for _ in range(900):
        result = [result]
    return result


@tree()
def deep_mixture(new: Ramp) -> Any:
    result: Any = new(1)
    for level in range(180):
        result = {level: [Frozen(ListWithAttributes([result]), level), (level, new(1))]}
    return result


@tree()
def deep_attributes(new: Ramp) -> Any:
    result = ListWithAttributes([new(1)])
    for level in range(60):
        outer = ListWithAttributes([level])
        outer.inner = result
        result = outer
    return result


@tree()
def wide(new: Ramp) -> Any:
    return {"dict": {f"layer{i}": new(1) for i in range(1000)}, "list": [new(1) for _ in range(500)]}


@tree()
def shared_containers(new: Ramp) -> Any:
    shared = {"a": new(2), "b": [1, 2]}
    return {"first": shared, "again": [shared, shared["b"]], "other": {"a": 1}}
