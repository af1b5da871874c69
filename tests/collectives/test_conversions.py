"""Conversions between ranks: files read through them into shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor, zeros

import statetree as st
from statetree.testing import Layout, run_ranks
from tests.collectives.checks import attempt, sent_by
from tests.collectives.test_stored import counted
from tests.kept_calls import of_one_call

RULES = [
    (["{i}.q", "{i}.k", "{i}.v"], "{i}.qkv", "(g q d) m, (g d) m, (g d) m -> (g (q + 1 + 1) d) m"),
    (["{i}.w1", "{i}.w3"], "{i}.gate_up", "f m, f m -> (f + f) m"),
    ("{i}.rotary", "{i}.wq", "(h d two) m -> (h two d) m"),
    ("{i}.moe", "{i}.experts.{e}", "e f m -> f m"),
    ("{i}.norm", "{i}.ln"),
]
CONVERSION = st.Conversion(RULES, sizes={"q": 4, "d": 4, "two": 2})


def trainer_state(layers=2, width=64):
    """Return a state whose elements are unique."""
    shapes = {
        "q": (64, width),
        "k": (16, width),
        "v": (16, width),
        "w1": (24, width),
        "w3": (24, width),
        "rotary": (32, width),
        "moe": (4, 8, width),
        "norm": (width,),
    }
    state, start = {}, 0
    for i in range(layers):
        for key, shape in shapes.items():
            count = torch.Size(shape).numel()
            state[f"{i}.{key}"] = torch.arange(start, start + count, dtype=torch.float32).view(shape)
            start += count
    return state


def spread(state, dim=0):
    """Return a state whose tensors are sharded, those of one dim whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        key: leaf if leaf.dim() == 1 else distribute_tensor(leaf, mesh, [Shard(dim)]) for key, leaf in state.items()
    }


def load_through(path):
    state = trainer_state()
    for dim in (0, 1):
        whole = CONVERSION(state)
        like = spread({key: torch.zeros(leaf.shape) for key, leaf in whole.items()}, dim)
        headers = counted(lambda: st.files.open(path))[1]
        # Checksums are of whole tensors, so that comparing them reads those whole.
        loaded, nbytes = counted(lambda like=like: st.load(path, like, through=CONVERSION, verify=False))
        for key, leaf in loaded.items():
            assert torch.equal(leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf, whole[key]), key
        local = [leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in loaded.values()]
        needed = sum(leaf.nbytes for leaf in local)
        most = {0: 1.05, 1: 2.0}[dim]  # of columns, what lies between is read where it is short
        extra = 1600 * len(state) if path.endswith("dir") else 256  # where a piece lies is read with it
        assert nbytes - headers <= most * needed + extra, (dim, nbytes - headers, needed)
        for verb in (st.reshard, st.distribute):
            moved, nbytes = counted(lambda verb=verb, like=like: verb(CONVERSION(st.files.open(path)), like))
            check_holds(moved, whole)
            fused = sum(leaf.to_local().nbytes for key, leaf in moved.items() if "ln" not in key)
            assert nbytes - headers <= most * fused + extra, (dim, verb, nbytes - headers, fused)
        place = {key: leaf.clone() for key, leaf in spread(CONVERSION(state), dim).items()}
        st.reshard(st.combine(torch.sub, *[CONVERSION(st.files.open(path))] * 2), place, in_place=True)
        assert not any(bool(leaf.full_tensor().any()) for leaf in place.values() if hasattr(leaf, "full_tensor"))
        narrow = {key: torch.zeros(leaf.shape, dtype=torch.bfloat16) for key, leaf in whole.items()}
        check_holds(
            st.reshard(st.cast(CONVERSION(st.files.open(path)), torch.float64), spread(narrow), cast=True), whole
        )
        tied = {**like, "1.qkv": like["0.qkv"]}
        with pytest.raises(st.TreeMismatch, match=r"ties at 1.qkv: values of its own cannot go into a tensor that is"):
            st.reshard(CONVERSION(st.files.open(path)), tied)
        with pytest.raises(st.TreeMismatch, match=r"shape differs at 0.qkv: expected"):
            st.reshard(CONVERSION(st.files.open(path)), {**like, "0.qkv": torch.zeros(3, 4)})


@of_one_call
@pytest.mark.parametrize("file", ["a.safetensors", "a.pt", "dir"])
def test_each_rank_reads_its_own_bytes(file, tmp_path):
    st.save(trainer_state(), tmp_path / file)
    run_ranks(2, load_through, str(tmp_path / file))


def fail_while_reading(path):
    def fails_on_one(tensor):
        if dist.get_rank() == 1 and tensor.numel() > 1:
            msg = "cannot read it"
            raise ArithmeticError(msg)
        return tensor

    like = spread({key: torch.zeros(leaf.shape) for key, leaf in trainer_state().items()})
    with pytest.raises(ArithmeticError if dist.get_rank() else st.RankMismatch, match="cannot read it"):
        st.reshard(st.combine(fails_on_one, st.files.open(path)), like)
    check_holds(st.reshard(st.files.open(path), like), trainer_state())


def test_all_ranks_raise_if_one_cannot_read(tmp_path):
    st.save(trainer_state(), tmp_path / "a.safetensors")
    run_ranks(2, fail_while_reading, str(tmp_path / "a.safetensors"))


def engine_like(dim=0, dtype=torch.float32):
    """Return a state of the engine's form, without its elements."""
    return spread({key: torch.zeros(leaf.shape, dtype=dtype) for key, leaf in CONVERSION(trainer_state()).items()}, dim)


def check_holds(found, whole):
    for key, leaf in found.items():
        local = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        assert torch.equal(local, whole[key].to(local.dtype)), key


def reshard_fused():
    state = trainer_state()
    whole = CONVERSION(state)
    for mine in (0, 1):
        trainer = spread(state, mine)
        for theirs in (0, 1):
            converted = CONVERSION(trainer)
            like = engine_like(theirs)
            found = st.reshard(converted, like)
            assert {key: type(leaf) for key, leaf in found.items()} == {key: type(leaf) for key, leaf in like.items()}
            check_holds(found, whole)
            placed = engine_like(theirs)
            again = st.reshard(converted, placed, in_place=True)
            assert all(again[key] is placed[key] for key in placed if "ln" not in key)
            check_holds(placed, whole)


def test_fused_tensors_go_from_shard_to_shard():
    run_ranks(2, reshard_fused)


def every_verb():
    from statetree.leaves.types.converted import ConvertedLeaf

    state = trainer_state()
    whole = CONVERSION(state)
    trainer = spread(state)
    converted = CONVERSION(trainer)
    assert {type(leaf) for key, leaf in converted.items() if "ln" not in key} == {ConvertedLeaf}
    assert all(leaf is trainer[key] for key, leaf in CONVERSION.inverse(converted).items())
    check_holds(st.gather(converted), whole)
    twice = st.gather(CONVERSION({"0.rotary": trainer["0.rotary"], "1.rotary": trainer["0.rotary"]}))
    assert twice["0.wq"] is twice["1.wq"]
    partial = st.gather(converted, dst=0)
    if dist.get_rank() == 0:
        check_holds(partial, whole)
    else:
        assert all(leaf.is_meta and leaf.shape == whole[key].shape for key, leaf in partial.items() if "ln" not in key)
    check_holds(st.gather(st.offload(converted)), whole)
    check_holds(st.reshard(converted, {key: torch.empty(leaf.shape) for key, leaf in whole.items()}), whole)
    check_holds(st.reshard(converted, engine_like(1, torch.bfloat16), cast=True), whole)
    check_holds(st.gather(st.cast(converted, torch.bfloat16)), whole)
    check_holds(st.gather(st.select(converted, "0.**")), whole)
    check_holds(st.chain(st.gather, st.offload)(converted), whole)
    check_holds(st.gather(st.partition_replicas(st.select(converted, ["*.qkv", "*.experts.*"]))), whole)
    with st.Stager() as stager:
        check_holds(st.gather(stager.stage(converted)), whole)
    assert st.similarity(converted, CONVERSION(spread(state)))
    assert not st.similarity(converted, CONVERSION(spread(state, 1)))
    with pytest.raises(st.UnsupportedLeaf, match=r"Conversion: the leaf at 0.qkv was converted before"):
        CONVERSION.inverse(st.offload(converted))
    with pytest.raises(st.TreeMismatch, match=r"value differs at b: expected that of a, its tie, got another"):
        st.Conversion([("x", ["a", "b"])]).inverse({"a": trainer["0.q"], "b": spread(state)["0.q"]})
    with pytest.raises(st.TreeMismatch, match=r"shape differs at 0.qkv"):
        st.reshard(converted, {**engine_like(), "0.qkv": torch.zeros(3, 4)})
    place = engine_like(1, torch.bfloat16)
    with st.prepare(st.reshard, converted, place, in_place=True, cast=True) as sync:
        for step in range(3):
            for leaf in trainer.values():
                (leaf.to_local() if hasattr(leaf, "to_local") else leaf).mul_(1 + step)
            sync()
            check_holds(place, CONVERSION(st.gather(trainer)))


def test_verbs_take_converted_leaves():
    run_ranks(2, every_verb)


def save_each_its_own(path):
    """Save converted shards of several layouts, replicas and uneven rows among them, and look at what was written."""
    whole = CONVERSION(trainer_state())
    alternating = st.Conversion([(["{i}.w1", "{i}.w3"], "{i}.both", "f m, f m -> (f (1 + 1)) m")], strict=False)
    size = dist.get_world_size()
    meshes = {"rows": (tuple(range(size)), ("S0",)), "columns": (tuple(range(size)), ("S1",))}
    if size == 4:
        meshes |= {"replicas": (((0, 1), (2, 3)), ("R", "S0")), "one": ((1,), ("S0",)), "three": ((0, 1, 3), ("S0",))}
    for name, (mesh, placements) in meshes.items():
        state = trainer_state()
        trainer = {
            key: Layout(tuple(leaf.shape), mesh, placements).build() if leaf.dim() > 1 else leaf
            for key, leaf in state.items()
        }
        st.distribute(state, trainer, in_place=True)
        converted = CONVERSION(trainer)
        assert st.digest(converted) == st.digest(whole)
        assert st.digest(st.select(converted, "0.qkv")) != st.digest({"0.qkv": whole["0.qkv"] + 1})
        st.save(converted, f"{path}/{name}")
        back = st.load(f"{path}/{name}")
        assert st.similarity(back, whole), (name, str(st.similarity(back, whole)))
        check_holds(st.load(f"{path}/{name}", engine_like(1)), whole)
        st.save(alternating(trainer), f"{path}/{name} alternating")
        assert st.similarity(st.load(f"{path}/{name} alternating"), alternating(state))
        listed = FileSystemReader(f"{path}/{name} alternating").read_metadata().state_dict_metadata
        assert max(len(entry.chunks) for entry in listed.values() if hasattr(entry, "chunks")) <= size, name
        parts = [len(found.chunks) for key, found in listed.items() if key.endswith("both")]
        assert name != "replicas" or parts == [2, 2]


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_saves_its_own_bytes(world_size, tmp_path):
    run_ranks(world_size, save_each_its_own, str(tmp_path))


def save_in_background(path):
    whole = CONVERSION(trainer_state())
    trainer = spread(trainer_state())
    with st.Checkpointer(path) as saver:
        saver.async_save(1, CONVERSION(trainer)).result()
        assert st.similarity(saver.restore(), whole)


def test_a_checkpointer_saves_converted_shards(tmp_path):
    run_ranks(2, save_in_background, str(tmp_path))


def element_numbers(state):
    """Return the elements that this rank holds of each tensor: every one of a trainer's state is another number."""
    local = {key: leaf.to_local() if hasattr(leaf, "to_local") else leaf for key, leaf in state.items()}
    return {key: {*leaf.flatten().tolist()} for key, leaf in local.items()}


def count_bytes():
    state = trainer_state()
    for mine, theirs in ((0, 0), (0, 1), (1, 0)):
        trainer = spread(state, mine)
        like, narrow = (engine_like(theirs, dtype) for dtype in (torch.float32, torch.bfloat16))
        found, sent = sent_by(lambda trainer=trainer, like=like: st.reshard(CONVERSION(trainer), like))
        halves = sent_by(lambda trainer=trainer, like=narrow: st.reshard(CONVERSION(trainer), like, cast=True))[1]
        held = set().union(*element_numbers(trainer).values())
        lacking = sum(len(numbers - held) for numbers in element_numbers(found).values())
        total = torch.tensor([sent, 2 * halves, 4 * lacking])
        dist.all_reduce(total)
        assert total[0] == total[1] == total[2], (mine, theirs, total.tolist())


@of_one_call
@pytest.mark.parametrize("world_size", [2, 4])
def test_each_element_moves_once_to_where_it_is_lacking(world_size):
    run_ranks(world_size, count_bytes)


class Block(torch.nn.Module):
    """A layer of a trainer, with names of its own."""

    def __init__(self):
        super().__init__()
        shapes = {"wq": (8, 12), "wk": (8, 6), "wv": (8, 6), "wo": (12, 8), "w1": (8, 10), "w3": (8, 10), "w2": (10, 8)}
        for name, (width, rows) in shapes.items():
            self.add_module(name, torch.nn.Linear(width, rows, bias=False))

    def forward(self, x):
        x = x + self.wo(self.wq(x) * torch.cat([self.wk(x), self.wv(x)], -1))
        return x + self.w2(self.w1(x).sigmoid() * self.w3(x))


TO_ENGINE = st.Conversion(
    [
        (["{i}.wq.weight", "{i}.wk.weight", "{i}.wv.weight"], "h.{i}.qkv", RULES[0][2]),
        ("{i}.wo.weight", "h.{i}.out"),
        (["{i}.w1.weight", "{i}.w3.weight"], "h.{i}.gate_up", "f m, f m -> (f + f) m"),
        ("{i}.w2.weight", "h.{i}.down"),
    ],
    sizes={"q": 2, "d": 2},
)


def by_hand(whole):
    """Return an engine's whole tensors, made of a trainer's whole ones."""
    found = {}
    for i in range(2):
        q, k, v, o, w1, w3, w2 = (whole[f"{i}.{name}.weight"] for name in ("wq", "wk", "wv", "wo", "w1", "w3", "w2"))
        groups = [part.view(3, -1, 8) for part in (q, k, v)]
        own = {"qkv": torch.cat(groups, 1).view(24, 8), "out": o, "gate_up": torch.cat([w1, w3]), "down": w2}
        found |= {f"h.{i}.{name}": leaf.bfloat16() for name, leaf in own.items()}
    return found


def train_and_serve():
    """Ranks 0 and 1 train under FSDP2 in float32; 2 and 3 serve in bfloat16, rows of fused tensors and columns."""
    trainers, engines = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block())
    shapes = {name: leaf.shape for name, leaf in model.state_dict().items()}
    if dist.get_rank() < 2:
        for module in (*model, model):
            fully_shard(module, mesh=trainers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = model.state_dict()
    else:
        state = {name: zeros(*shape, device_mesh=trainers, placements=[Shard(0)]) for name, shape in shapes.items()}
    cuts = {"qkv": Shard(0), "gate_up": Shard(0), "out": Shard(1), "down": Shard(1)}
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    engine = {
        name: zeros(*leaf.shape, device_mesh=engines, placements=[cuts[name.split(".")[-1]]], dtype=torch.bfloat16)
        for name, leaf in by_hand(whole).items()
    }
    seen = []
    with st.prepare(st.reshard, TO_ENGINE(state), engine, in_place=True, cast=True) as sync:
        for step in range(20):
            if dist.get_rank() < 2:
                model(torch.randn(4, 8) + step).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            sync()
            expected = by_hand(st.gather(state))
            seen.append(expected["h.0.qkv"].clone())
            for name, leaf in engine.items():
                if dist.get_rank() >= 2:
                    own = expected[name].chunk(2, cuts[name.split(".")[-1]].dim)[dist.get_rank() - 2]
                    assert torch.equal(leaf.to_local(), own), (step, name)
    assert not torch.equal(seen[0], seen[-1])


def test_a_trainer_and_an_engine_on_ranks_of_their_own():
    run_ranks(4, train_and_serve)


FUSED = st.Conversion([(["w1", "w3"], "g", "f m, f m -> (f + f) m")])
BY_TURNS = st.Conversion([(["w1", "w3"], "g", "f m, f m -> (f (1 + 1)) m")])


def gather_again(dst):
    """Gather, prepared, what changes in between."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for conversion in (FUSED, BY_TURNS):
        state = {key: distribute_tensor(torch.rand(3, 2), mesh, [Shard(0)]) for key in ("w1", "w3")}
        with st.prepare(st.gather, {"a": conversion(state), "b": conversion(state)}, dst=dst) as call:
            for _ in range(2):
                for leaf in state.values():
                    leaf.to_local().add_(1)
                whole = conversion(st.gather(state))["g"]
                gathered = call()
                is_here = dst is None or dist.get_rank() == dst
                found += [torch.equal(leaf["g"], whole) if is_here else leaf["g"].is_meta for leaf in gathered.values()]
    return found


@pytest.mark.parametrize("dst", [None, 1])
def test_a_prepared_gather_fills_what_is_made_of_blocks(dst):
    assert run_ranks(2, gather_again, dst) == [[True] * 8] * 2


class Scaled:
    """A third party's tensor, which is a copy of its parts."""

    def __init__(self, inner):
        self.inner = inner


class ScaledType(st.LeafType):
    def unpack(self, value):
        return [value.inner], None

    def pack(self, context, parts):
        return Scaled(parts[0].clone())


def prepare_a_copy():
    st.register_leaf_type(Scaled, ScaledType())
    mesh = init_device_mesh("cpu", (2,))
    leaf = Scaled(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    with pytest.raises(st.UnsupportedLeaf, match=r"the leaf at x \(Scaled\) is a copy of the parts") as error:
        st.prepare(st.gather, {"x": leaf})
    return str(error.value.path), st.gather({"x": leaf})["x"].inner.tolist()


def test_what_is_a_copy_of_its_parts_cannot_be_prepared():
    assert run_ranks(2, prepare_a_copy, fresh=True) == [("x", [1.0] * 4)] * 2


def keep_attributes_and_ties():
    mesh = init_device_mesh("cpu", (2,))
    weights = [distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]) for _ in range(2)]
    state = {key: torch.nn.Parameter(leaf) for key, leaf in zip(("w1", "w3"), weights, strict=True)}
    for leaf in state.values():
        leaf.note = ["kept"]
    gathered = st.gather(FUSED(state))["g"]
    state["w3"].note = ["another"]
    with pytest.raises(st.TreeMismatch, match="attributes differs at w3"):
        FUSED(state)
    with pytest.raises(st.TreeMismatch, match=r"ties at w3: a copy cannot go into the tensor at w1"):
        FUSED({"w1": weights[0], "w3": weights[0]})
    partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
    with pytest.raises(
        st.TreeMismatch, match="leaf type differs at w3: expected distributed tensor, as w1 has, got Tensor"
    ):
        FUSED({"w1": weights[0], "w3": torch.ones(3, 2)})
    with pytest.raises(st.UnsupportedLeaf, match="the leaf at w1 is Partial"):
        FUSED({"w1": partial, "w3": partial.clone()})
    return gathered.note, gathered.note is not state["w1"].note, type(gathered) is torch.nn.Parameter


def test_converted_shards_keep_attributes_and_refuse_what_whole_tensors_refuse():
    assert run_ranks(2, keep_attributes_and_ties) == [(["kept"], True, True)] * 2


def convert_empty():
    mesh = init_device_mesh("cpu", (2,))
    for rule, shapes in (
        ((["x", "y"], "w", "m f, n f -> (m + n) f"), {"x": (3, 2), "y": (0, 2)}),
        (("e.{b}", "x.{a}", "(a c) -> (b c)"), {"e.0": (0,), "e.1": (0,), "e.2": (0,)}),
        ((["x", "y"], "w", "(c d) b, b c -> (b (d + 1) c)"), {"x": (0, 3), "y": (3, 0)}),
    ):
        conversion = st.Conversion([rule], sizes={"a": 2, "b": 3, "c": 0, "d": 3, "m": 3, "n": 0})
        whole = {key: torch.arange(float(torch.Size(shape).numel())).view(shape) for key, shape in shapes.items()}
        state = {key: distribute_tensor(leaf, mesh, [Shard(0)]) for key, leaf in whole.items()}
        converted, expected = conversion(state), conversion(whole)
        again = conversion.inverse(converted)
        assert all(again[key] is leaf for key, leaf in state.items() if leaf.numel())
        like = {key: distribute_tensor(leaf, mesh, [Shard(0)]) for key, leaf in expected.items()}
        for found, wanted in ((st.gather(converted), expected), (st.gather(again), whole)):
            assert {key: leaf.shape for key, leaf in found.items()} == {key: w.shape for key, w in wanted.items()}
            check_holds(found, wanted)
        check_holds(st.reshard(converted, like), expected)


def test_blocks_without_elements_are_converted():
    run_ranks(2, convert_empty)


QK_RULE = (["q", "k"], "qk", "a m, b m -> (a + b) m")
TO_QK = st.Conversion([QK_RULE, ("w", "v")])


def prepare_fused(alike):
    """Prepare a tensor made of two plain ones, which lie side by side on the first rank, or on none."""
    base = torch.arange(18.0).view(6, 3)
    state = {"q": base[:4], "k": base[4:], "w": torch.ones(2)}
    if alike or dist.get_rank():
        state["k"] = state["k"].clone()
    engine, renamed = {"qk": torch.zeros(6, 3), "v": torch.zeros(2)}, st.Conversion([("qk", "x"), ("v", "v")])
    calls = [
        lambda: st.prepare(st.reshard, TO_QK(state), engine, in_place=True),
        lambda: st.prepare(st.reshard, renamed(TO_QK(state)), {"x": engine["qk"], "v": engine["v"]}),
    ]
    return [attempt(call) for call in calls], st.reshard(TO_QK(state), engine)["qk"].tolist()


@pytest.mark.parametrize("alike", [True, False])
def test_a_copy_that_a_conversion_made_of_plain_tensors_is_not_prepared(alike):
    found = run_ranks(2, prepare_fused, alike)
    for errors, resharded in found:
        assert ["is a copy that a conversion made" in str(error) for error in errors] == [True, True], errors
        assert resharded == torch.arange(18.0).view(6, 3).tolist()


def prepare_passed_through():
    """Prepare what passes a copy of plain tensors through, or sends it."""
    mesh = init_device_mesh("cpu", (2,))
    turned = st.Conversion([("w", "v", "(a b) -> (b a)"), ("d", "e")], sizes={"a": 2})
    state = {"w": torch.arange(6.0), "d": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
    calls = [
        lambda: st.prepare(st.gather, turned(state)),
        lambda: st.prepare(st.gather, turned(state), dst=0),
        lambda: st.prepare(st.gather, turned(state), union=True),
        lambda: st.prepare(st.broadcast, {"v": turned(state)["v"]}),
    ]
    return [str(attempt(call)) for call in calls]


def test_a_copy_that_a_conversion_made_is_not_prepared_where_it_is_passed_through_or_sent():
    for errors in run_ranks(2, prepare_passed_through):
        assert all("leaf at v is a copy that a conversion made" in error for error in errors), errors


def test_copies_whose_parts_are_gone_and_that_are_written_to_are_prepared():
    parts = {"q": torch.ones(4, 3), "k": torch.ones(2, 3)}
    engine, conversion = {"qk": torch.zeros(6, 3)}, st.Conversion([QK_RULE])
    place = conversion(parts)
    with st.prepare(st.reshard, {"qk": torch.full((6, 3), 2.0)}, place, in_place=True) as fill:
        assert fill()["qk"].sum() == 36
    with pytest.raises(st.UnsupportedLeaf, match="is a copy that a conversion made"):
        st.prepare(st.reshard, place, engine, in_place=True)
    again = st.Conversion([("qk", "qk", "a m -> a m")])(place)
    parts.clear()
    st.prepare(st.reshard, again, engine, in_place=True).close()
    with st.prepare(st.reshard, place, engine, in_place=True) as sync:
        place["qk"].add_(1)
        assert sync()["qk"].sum() == 54


def test_weights_that_a_model_took_over_are_prepared():
    model, parts = torch.nn.Linear(3, 6, bias=False), {"q": torch.ones(4, 3), "k": torch.ones(2, 3)}
    model.load_state_dict(st.Conversion([(["q", "k"], "weight", "a m, b m -> (a + b) m")])(parts), assign=True)
    with st.prepare(st.reshard, model.state_dict(), {"weight": torch.zeros(6, 3)}, in_place=True) as sync:
        assert sync()["weight"].sum() == 18


def test_views_that_a_conversion_made_of_plain_tensors_are_prepared():
    base, engine = torch.arange(18.0).view(6, 3), {"qk": torch.zeros(6, 3)}
    converted = st.Conversion([QK_RULE])({"q": base[:4], "k": base[4:]})
    with st.prepare(st.reshard, converted, engine, in_place=True) as sync:
        for _ in range(2):
            base.add_(1)
            assert sync()["qk"].tolist() == base.tolist()
