"""Writes the plan of a step once its tokens and blocks are decided. Pure."""

from array import array

from megallm.core_async.messages import BlockGrant, StepPlan, pack_ints
from megallm.core_async.plan.flight import InFlight
from megallm.core_async.plan.policy import Choice


def write_plan(step: InFlight, choice: Choice, grant: BlockGrant | None) -> StepPlan:
    """Gives the plan, counts its tokens as computed, and notes in `step` whom the result will concern."""
    rows = [request.row for request in choice.decodes]
    starts = [request.num_computed for request in choice.decodes]
    lengths = [1] * len(rows)
    samples = bytearray(b"\1" * len(rows))
    scored = bytearray(len(rows))
    tokens, targets = array("i"), array("i")
    for request in choice.decodes:
        request.num_computed += 1
        request.num_tokens += 1
        if request.num_tokens >= request.max_tokens:
            step.last.append(request)
    step.sampled += choice.decodes
    for request, length in choice.chunks:
        start = request.num_computed
        rows.append(request.row)
        starts.append(start)
        lengths.append(length)
        tokens += request.tokens[start : start + length]
        request.num_computed += length
        chunk_targets = step.score(request, start, length)
        scored.append(bool(chunk_targets))
        targets += chunk_targets
        samples.append(step.compute(request))
    return StepPlan(
        step=step.number,
        num_decode=len(choice.decodes),
        rows=pack_ints(rows),
        starts=pack_ints(starts),
        lengths=pack_ints(lengths),
        samples=bytes(samples),
        tokens=pack_ints(tokens),
        new_rows=[request.setup() for request in choice.admitted],
        changed_rows=pack_ints(grant.changed_rows if grant else ()),
        changed_starts=pack_ints(grant.changed_starts if grant else ()),
        changed_counts=pack_ints(grant.changed_counts if grant else ()),
        blocks=pack_ints(grant.blocks if grant else ()),
        scored=bytes(scored) if targets else b"",
        targets=pack_ints(targets),
    )
