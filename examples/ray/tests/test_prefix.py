"""Keys and ranks, without Ray."""

import json
from collections import Counter

from conftest import MODEL  # noqa: F401  (sets the paths)
from xserv_ray.prefix import LOAD_SLACK, PREFIX_CHARS, PREFIX_TOKENS, key_of, ranked

REPLICAS = [f"replica-{number}" for number in range(5)]


def key(authorization=None, **fields):
    return key_of(json.dumps(fields).encode(), authorization)


def turns(*texts, system="Be kind."):
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *said]


def test_all_turns_of_a_conversation_have_one_key():
    first = key(messages=turns("A story, please."))
    assert first
    assert key(messages=turns("A story, please.", "Once", "Go on."), temperature=1) == first


def test_other_conversations_have_others():
    keys = [
        key(messages=turns("A story, please.")),
        key(messages=turns("A poem, please.")),
        key(messages=turns("A story, please.", system="Be brief.")),
        key(messages=turns("A story, please."), tools=[{"type": "function", "function": {"name": "f"}}]),
        key(messages=turns("A story, please."), cache_salt="a"),
        key(messages=turns("A story, please."), authorization=b"Bearer one"),
        key(messages=turns("A story, please."), authorization=b"Bearer two"),
        key(prompt="A story, please."),
    ]
    assert len(set(keys)) == len(keys) and all(keys)


def test_a_long_common_beginning_is_one_key():
    text = "word " * PREFIX_CHARS
    assert key(messages=turns(text + "a")) == key(messages=turns(text + "b"))
    assert key(prompt=text + "a") == key(prompt=[text + "b", "other"])
    tokens = list(range(PREFIX_TOKENS))
    assert key(prompt=[*tokens, 1]) == key(prompt=[*tokens, 2]) == key(prompt=[tokens])
    assert key(prompt=[2, *tokens]) != key(prompt=tokens)
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "a"}]
    assert key(messages=turns(parts)) == key(messages=turns(text))


def test_what_has_no_prompt_has_no_key():
    for body in (b"", b"{", b"[]", b"1", b"\xff", b"{}", b'{"messages":[]}', b'{"prompt":""}', b'{"prompt":[]}'):
        assert key_of(body, None) == b"", body
    # It is the replica that says what is wrong with these.
    for fields in ({"messages": [1]}, {"messages": [{"role": 3}]}, {"messages": "a"}, {"prompt": {}}, {"prompt": [None]}):
        assert isinstance(key(**fields), bytes), fields
    assert isinstance(key_of(b"[" * 100000, None), bytes)


def test_ranks_are_the_same_everywhere_and_spread():
    firsts = Counter()
    for number in range(500):
        order = ranked(b"%d" % number, REPLICAS, {}, [])
        assert sorted(order) == REPLICAS
        assert order == ranked(b"%d" % number, reversed(REPLICAS), {}, [])
        firsts[order[0]] += 1
    assert min(firsts.values()) > 50, firsts


def test_a_replica_that_goes_moves_its_own_keys_only():
    for number in range(200):
        order = ranked(b"%d" % number, REPLICAS, {}, [])
        fewer = ranked(b"%d" % number, REPLICAS[1:], {}, [])
        assert fewer == [name for name in order if name != REPLICAS[0]]


def test_one_beginning_does_not_fill_a_replica():
    loads = Counter()
    for _ in range(200):
        loads[ranked(b"a", REPLICAS, loads, [])[0]] += 1
    assert max(loads.values()) <= 1.25 * 200 / 5 + LOAD_SLACK + 1, loads
    # Without any load, it is always the same one.
    assert {ranked(b"a", REPLICAS, {}, [])[0] for _ in range(20)} == {ranked(b"a", REPLICAS, {}, [])[0]}


def test_without_a_key_the_idle_one_is_first():
    loads = {name: 3 for name in REPLICAS[:4]}
    assert ranked(b"", REPLICAS, loads, [])[0] == REPLICAS[4]


def test_where_it_has_failed_is_last():
    order = ranked(b"a", REPLICAS, {}, [])
    assert ranked(b"a", REPLICAS, {}, order[:2]) == [*order[2:], *order[:2]]
    # It is better than none.
    assert ranked(b"a", REPLICAS[:1], {}, REPLICAS[:1]) == REPLICAS[:1]
