"""Moves the requests of a beam search as the search says: beams that are chosen twice fork, others end."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpage.request import Request
from jaxpage.scheduler.group import RequestGroup
from jaxpage.scheduler.roster import Roster

Candidates = Sequence[tuple[int, float]]
"""The most likely (token id, logprob) of a beam, best first."""


def advance(roster: Roster, group: RequestGroup, candidates: list[Candidates]) -> None:
    """Moves a search one token on, given what each beam's last step said."""
    assert group.search is not None, "only a search advances"
    chosen = group.search.advance(candidates)
    roster.stats.num_generated_tokens += len(chosen)
    if group.search.is_over:
        roster.end_search(group)
        return
    old, parents = list(group.requests), {parent for parent, _ in chosen}
    for place, request in enumerate(old):
        if place not in parents:
            roster.leave(request, group)
    beams: list[Request] = []
    for parent, _ in chosen:
        beams.append(_fork(roster, old[parent], group) if old[parent] in beams else old[parent])
    for place, (request, (_, token_id)) in enumerate(zip(beams, chosen, strict=True)):
        request.token_ids.append(token_id)
        request.order = (group.priority, group.arrival, place)
    group.requests = beams
    roster.sort()


def _fork(roster: Roster, parent: Request, group: RequestGroup) -> Request:
    child = Request(
        f"{parent.request_id}'",
        parent.prompt_token_ids,
        parent.params,
        parent.max_tokens,
        end_token_ids=parent.end_token_ids,
        cache_salt=parent.cache_salt,
        token_ids=parent.token_ids,
    )
    group.waiting.append(child)
    roster.enter(child, group, 0)
    roster.kv.fork(parent, child, parent.num_computed_tokens)
    roster.start(child, group, parent.num_computed_tokens, 0)
    return child
