"""What a type checker holds against a user. The comment of a line is the error that is expected of it."""

from typing import Any

import statetree as st
from statetree import dcp, testing


def wrong(state: dict[str, Any]) -> None:
    st.offload(state, "cpu")  # call-arg
    st.offload(state, pinned=True)  # call-arg
    st.similarity(state)  # call-arg
    st.unflatten(state, [])  # arg-type
    st.gather(state, dst="0")  # arg-type
    st.gather(state, timeout="a minute")  # arg-type
    st.chain(1)  # arg-type
    st.stream(state, "offload")  # arg-type
    st.map_leaves("halve", state)  # call-overload
    st.Stager(True)  # call-arg
    st.Stager(max_snapshots="two")  # arg-type
    print(st.flatten(state).leaves)  # attr-defined
    st.register_leaf_type(state, None)  # arg-type
    st.save(state)  # call-arg
    st.load("directory", in_place="yes")  # arg-type
    dcp.Checkpointer("run", keep="all")  # arg-type
    testing.run_ranks("two", wrong)  # arg-type
    print(testing.no_such_name)  # attr-defined
