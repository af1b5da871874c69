"""``distribute``: whole tensors in the layout of another tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.agreement import Statement
from statetree.chunks import whole_on
from statetree.collectives import Item, check_bucket, check_rank
from statetree.compose import collective_unless
from statetree.errors import UnsupportedLeaf
from statetree.exchange import BUCKET_BYTES
from statetree.groups import Group, Timeout, group_of
from statetree.relayout import Relayout, apart, partners_of, tied_apart, unfit
from statetree.spreading import Elements, Made, Parcel, Sent, packed, spread
from statetree.summands import Source
from statetree.survey import Survey, path_order
from statetree.target import Target, bare, refuse
from statetree.torch_internals import quietly

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from statetree.chunks import Layout
    from statetree.treespec import TreeSpec


@collective_unless(lambda options: options.get("src") is None)
def distribute(
    full: Any,
    like: Any,
    *,
    src: int | None = None,
    group: ProcessGroup | None = None,
    in_place: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    timeout: Timeout = None,
) -> Any:
    """Bring a tree of whole tensors into the layout of another tree: the inverse of ``gather``.

    Args:
        full: A tree of tensors that are not distributed.
        like: A tree of the same structure, whose tensors have the same global shapes and dtypes. It gives layouts,
            devices, strides, ties and classes. Without ``in_place`` its contents do not matter, and its tensors may be
            ``meta`` ones.
        src: With ``None`` every rank holds ``full`` and takes its own part of it, without communication. Otherwise the
            rank of the group that holds it: each rank receives its own chunks alone, and ``full`` of the others, which
            may be ``None``, is not looked at. Tensors that are not distributed are the source's on every rank.
        group: The ranks that take part; by default all.
        in_place: Write into the tensors of ``like`` instead of fresh ones.
        bucket_bytes: How many bytes a rank sends and receives at a time, by default 64 MiB. Two such buckets are the
            memory that it takes beside the result (and tensors that are not distributed, twice).
        timeout: How long each collective may take, in seconds or as a ``timedelta``; by default what the group allows.

    Returns:
        A tree with the structure and plain values of ``full``, and tensors in the layouts of ``like``.

    Aliasing:
        None, but with ``in_place`` the tensors are those of ``like``.

    Collective:
        With ``src``, every rank of the group calls it, with the same options. Structure and plain values are sent by
        pickle. Without ``src`` there is nothing to wait for: a rank that gives one waits for those that do not.

    Raises:
        TreeMismatch: If structure, global shapes or dtypes differ, a tensor of ``like`` cannot be written or is
            ``Partial``, or tensors of ``like`` are tied that hold different values in ``full``, or overlap without
            being the same view. Nothing is written then.
        RankMismatch: If the ranks pass a different ``like`` or different options, if one of them failed or did not
            answer in time, or if ``src`` is not a rank of the group.
        UnsupportedLeaf: If a leaf of ``full`` is distributed or cannot be sent.
        MemoryError: As for ``gather``. A rank without memory for the description of the source's tree leaves the others
            waiting: that is received when they are agreed.

    Example:
        >>> import statetree as st, torch
        >>> st.distribute({"w": torch.ones(2)}, like={"w": torch.empty(2, device="meta")})
        {'w': tensor([1., 1.])}
    """
    if src is None:
        return _slice(full, like, group_of("distribute", group, timeout), bucket_bytes, in_place=in_place)
    return _send(full, like, src, group_of("distribute", group, timeout), bucket_bytes, in_place=in_place)


def _surveyed(full: Any, group: Group) -> Survey:
    survey = Survey("distribute", full, group)
    for index, holding in survey.holdings.items():
        path = survey.path(index)
        msg = (
            f"distribute: the leaf at {path or '<root>'} is distributed already: expected a whole tensor, got "
            f"{holding.text}. Use reshard."
        )
        raise UnsupportedLeaf(msg, path)
    return survey


@quietly
def _slice(full: Any, like: Any, group: Group, bucket_bytes: int, *, in_place: bool) -> Any:
    group.check_usable()
    check_bucket("distribute", bucket_bytes)
    relayout = Relayout(_surveyed(full, group), like, group, in_place=in_place)
    return relayout.run_alone()


@quietly
def _send(full: Any, like: Any, src: int, group: Group, bucket_bytes: int, *, in_place: bool) -> Any:
    surveys: list[Survey] = []

    def prepare() -> tuple[Statement, tuple[Survey, Sent]]:
        check_bucket("distribute", bucket_bytes)
        check_rank("distribute", "src", src, group)
        wanted = Survey("distribute", like, group, written=True)

        def distributed(leaves: list[Any], spec: TreeSpec) -> dict[int, Elements]:
            survey = _surveyed(full, group)
            surveys.append(survey)
            partners = partners_of("distribute", spec, leaves, wanted)
            moving = [index for index in survey.order if partners[index] in wanted.holdings]
            refuse("distribute", unfit(survey, wanted, partners, moving))
            return {index: (leaves[index].dtype, tuple(leaves[index].shape)) for index in moving}

        sent = packed("distribute", full, distributed) if group.rank == src else Sent()
        options = f"distribute(src={src}, in_place={in_place}, bucket_bytes={bucket_bytes})"
        return Statement(options, wanted.entries(), wanted.details(), len(sent.message)), (wanted, sent)

    def make(parcel: Parcel, wanted: Survey | None, layouts: dict[int, Layout], leaves: list[Any]) -> Made:
        assert wanted is not None
        partners = partners_of("distribute", parcel.spec, leaves, wanted)
        target = Target(parcel.spec, wanted, partners, group, in_place=in_place)
        moving = [index for index in path_order(parcel.spec) if index in parcel.shapes]
        target.check_writable(moving)
        target.check_apart(moving)
        for survey in surveys:  # the source's: it may hold nothing of leaves that others know to be tied
            refuse("distribute", tied_apart(survey, wanted, partners, moving))
        sources = surveys[0].leaves if surveys else []
        items: list[Item] = []
        for index in moving:
            if target.leader(index) == index:
                dtype, shape = parcel.shapes[index]
                pieces = [bare(sources[index])] if sources and sources[index].numel() else []
                items.append((Source(whole_on(shape, [src]), pieces), target.receipt(index, layouts), dtype))
        described = [leaves[index] for index in parcel.described]
        return Made(target.leaves, apart(items), target.prepare_copy(parcel.described, described))

    return spread("distribute", src, group, bucket_bytes, prepare, make)
