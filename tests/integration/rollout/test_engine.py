"""What the engine samples, against Hugging Face: log-probs, seeds, ends, and new weights. Real vLLM, float32."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter

import pytest
import torch

from services.rollout.engine import Completion, Delta, EngineError, Request
from services.rollout.updates import StaleVersion, UpdateFailed
from tests.integration.rollout.conftest import Bench
from tests.integration.rollout.generating import SHARED_PROMPT, TOLERANCE, complete, worst_difference
from tests.integration.rollout.models import END_OF_TURN, EOS, VOCAB, named_tensors, reference_log_probs
from trireme.weights.manifest import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]


async def test_log_probs_follow_the_weights_through_several_updates(bench: Bench) -> None:
    """W-01, W-02, W-05, W-06, P-12: equal to Hugging Face before, after the first and after later updates, tied and
    untied, on one shared prompt of 200 tokens that the prefix cache knows, with and without updating in flight."""
    differences = []
    for round_ in range(4):
        if round_:
            await bench.publish(seed=round_, in_flight=round_ == 3)
        for seed in range(2):
            completion = await complete(bench.engine, SHARED_PROMPT, seed=seed)
            assert {span.version for span in completion.versions} == {bench.engine.version}
            differences.append(worst_difference(bench.weights, SHARED_PROMPT, completion))
    assert max(differences) < TOLERANCE, differences


async def test_fresh_weights_are_far_from_the_old_ones(bench: Bench) -> None:
    """The comparison above can fail: the version before is off by far more than the tolerance."""
    old = bench.weights
    await bench.publish(seed=11)
    completion = await complete(bench.engine, SHARED_PROMPT)
    assert worst_difference(old, SHARED_PROMPT, completion) > 0.5


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
async def test_log_probs_are_those_that_were_sampled_from(bench: Bench, temperature: float) -> None:
    """P-01, P-02, P-06: log_softmax(logits / T), although the model folder asks for repetition_penalty and top_k."""
    for seed in range(3):
        completion = await complete(bench.engine, SHARED_PROMPT[:40], seed=seed, temperature=temperature)
        assert worst_difference(bench.weights, SHARED_PROMPT[:40], completion, temperature) < TOLERANCE


async def test_a_filter_renormalises_as_documented(tied: Bench) -> None:
    """P-05: with top_k=1 the one token left has log-prob 0."""
    completion = await complete(tied.engine, SHARED_PROMPT[:9], top_k=1)
    assert completion.log_probs == (0.0,) * len(completion.token_ids)


async def test_greedy_is_the_argmax_and_logs_the_full_distribution(tied: Bench) -> None:
    """P-04: temperature 0."""
    prompt = SHARED_PROMPT[:21]
    completion = await complete(tied.engine, prompt, temperature=0.0)
    assert worst_difference(tied.weights, prompt, completion) < TOLERANCE
    with torch.inference_mode():
        logits = tied.weights(torch.tensor([prompt + list(completion.token_ids)])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(completion.token_ids)


async def test_seeds_make_samples_differ_and_repeat(bench: Bench) -> None:
    """P-08, P-09."""

    async def eight() -> list[tuple[int, ...]]:
        made = await asyncio.gather(*(complete(bench.engine, SHARED_PROMPT[:5], seed=s) for s in range(8)))
        return [m.token_ids for m in made]

    first = await eight()
    assert len(set(first)) == 8
    assert await eight() == first


async def test_sampling_follows_the_distribution(tied: Bench) -> None:
    """First tokens of 400 seeds against the reference's probabilities: total variation as chance allows."""
    prompt, count = SHARED_PROMPT[:12], 400
    made = await asyncio.gather(*(complete(tied.engine, prompt, seed=s, max_new_tokens=1) for s in range(count)))
    drawn = Counter(m.token_ids[0] for m in made)
    with torch.inference_mode():
        probabilities = tied.weights(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    fair = torch.multinomial(probabilities, count, replacement=True, generator=torch.Generator().manual_seed(0))
    fair_counts = Counter(fair.tolist())

    def distance(counts: Counter[int]) -> float:
        return sum(abs(counts[i] / count - float(probabilities[i])) for i in range(VOCAB)) / 2

    assert distance(drawn) < 1.25 * distance(fair_counts)


async def test_more_prompts_at_once_than_fit_into_one_pass(tied: Bench) -> None:
    """Seeded requests whose prefill would have to be cut: on a CPU vLLM dies of that unless told not to cut."""
    prompts = [[(i * 31 + j) % 256 for j in range(250)] for i in range(40)]
    made = await asyncio.gather(*(complete(tied.engine, p, max_new_tokens=3) for p in prompts))
    assert max(worst_difference(tied.weights, p, m) for p, m in zip(prompts, made, strict=True)) < TOLERANCE


async def test_every_end_token_ends_a_response_and_is_kept(bench: Bench) -> None:
    """T-05 and the end tokens of generation_config.json: both are honoured, in the response, with a log-prob; and
    vocabulary padding (ids from 301 on) is never sampled."""
    made = await asyncio.gather(
        *(complete(bench.engine, SHARED_PROMPT[:8], seed=s, max_new_tokens=250, temperature=1.5) for s in range(48))
    )
    ends = {EOS, END_OF_TURN}
    for completion in made:
        assert not ends & set(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in ends) == (completion.finish == "stop")
        assert completion.finish == "stop" or len(completion.token_ids) == 250
        assert len(completion.log_probs) == len(completion.token_ids)
        assert max(completion.token_ids) < VOCAB
    assert {c.token_ids[-1] for c in made if c.finish == "stop"} == ends


async def test_a_stop_token_of_the_request_ends_it(tied: Bench) -> None:
    free = await complete(tied.engine, SHARED_PROMPT[:8], max_new_tokens=12)
    wanted = free.token_ids[5]
    cut = await complete(tied.engine, SHARED_PROMPT[:8], max_new_tokens=12, stop_token_ids=(wanted,))
    end = free.token_ids.index(wanted) + 1
    assert cut.token_ids == free.token_ids[:end] and cut.finish == "stop"


async def test_a_stop_string_ends_it_and_stays_in_tokens_and_text(tied: Bench) -> None:
    """Tokens of the stop string were sampled by the model: they keep their log-probs."""
    for seed in range(20):
        free = await complete(tied.engine, SHARED_PROMPT[:8], seed=seed, max_new_tokens=24)
        if letters := [c for c in free.text if c.isascii() and c.isalnum()]:
            break
    cut = await complete(tied.engine, SHARED_PROMPT[:8], seed=seed, max_new_tokens=24, stop_strings=(letters[0],))
    assert cut.finish == "stop" and cut.text.endswith(letters[0]) and cut.text.count(letters[0]) == 1
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert len(cut.log_probs) == len(cut.token_ids)


async def test_the_context_ends_a_response(tied: Bench) -> None:
    prompt = (SHARED_PROMPT * 2)[: tied.engine.max_model_len - 3]
    completion = await complete(tied.engine, prompt, max_new_tokens=50)
    assert completion.finish in ("length", "stop") and len(completion.token_ids) <= 3


async def test_deltas_add_up_to_the_completion(tied: Bench) -> None:
    request = Request(uuid.uuid4().hex, tuple(SHARED_PROMPT[:8]), seed=3, max_new_tokens=10)
    *deltas, last = [e async for e in tied.engine.generate(request, stream=True)]
    assert isinstance(last, Completion) and all(isinstance(d, Delta) for d in deltas)
    assert tuple(t for d in deltas for t in d.token_ids) == last.token_ids  # type: ignore[union-attr]
    assert tuple(p for d in deltas for p in d.log_probs) == last.log_probs  # type: ignore[union-attr]


async def test_running_requests_finish_first_under_the_old_weights(bench: Bench) -> None:
    """W-03: an update while a request runs, not in flight."""
    old_version, old = bench.engine.version, bench.weights
    running = asyncio.create_task(complete(bench.engine, SHARED_PROMPT, max_new_tokens=60, seed=5))
    await _until_running(bench)
    await bench.publish(seed=21)
    assert running.done()
    completion = await running
    assert {s.version for s in completion.versions} == {old_version}
    assert worst_difference(old, SHARED_PROMPT, completion) < TOLERANCE
    after = await complete(bench.engine, SHARED_PROMPT)
    assert worst_difference(bench.weights, SHARED_PROMPT, after) < TOLERANCE


async def test_in_flight_each_token_has_the_version_and_log_prob_of_its_weights(bench: Bench) -> None:
    """P-17, W-03: one response, two versions; every part equals Hugging Face under the weights it names."""
    old_version, old = bench.engine.version, bench.weights
    new, prompt = bench.model.fresh(22), SHARED_PROMPT[:40]
    manifest = bench.offer(new)  # before the request starts: what is left to do is short beside 270 tokens
    running = asyncio.create_task(complete(bench.engine, prompt, max_new_tokens=270, ignore_eos=True))
    await _until_running(bench)
    await bench.keeper.update(manifest, in_flight=True)
    bench.weights = new
    completion = await running
    assert [s.version for s in completion.versions] == [old_version, bench.engine.version]
    assert completion.versions[1].start == completion.versions[0].length
    for span, weights in zip(completion.versions, (old, new), strict=True):
        expected = reference_log_probs(weights, prompt, list(completion.token_ids))
        part = slice(span.start, span.start + span.length)
        assert float((torch.tensor(completion.log_probs) - expected)[part].abs().max()) < TOLERANCE


async def _until_running(bench: Bench) -> None:
    """Until the one request of a test has been in the running batch for some steps."""
    while not bench.engine.pressure().running:
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.05)


async def test_damaged_weights_are_refused_and_the_old_ones_go_on(bench: Bench) -> None:
    """A flipped byte in shared memory: the tensor is named, and what was sampled from stays whole."""
    manifest = bench.offer(bench.model.fresh(31))
    with open(manifest.location, "r+b") as file:
        file.seek(64)
        file.write(b"\xff\x00\xff")
    with pytest.raises(UpdateFailed, match="model.embed_tokens.weight.*checksum"):
        await bench.keeper.update(manifest, in_flight=False)
    assert not bench.keeper.serving
    completion = await complete(bench.engine, SHARED_PROMPT)
    assert worst_difference(bench.weights, SHARED_PROMPT, completion) < TOLERANCE
    await bench.publish(seed=32)
    assert bench.keeper.serving


async def test_missing_and_foreign_tensors_are_refused_by_name(tied: Bench) -> None:
    """W-16: before anything is changed."""
    tensors = [(n.replace("layers.1.", "layers.7."), t) for n, t in named_tensors(tied.model.fresh(33))]
    manifest = tied.transport.offer(build(next(tied._versions), tied.keeper._run, tensors), tensors)
    with pytest.raises(UpdateFailed, match=r"missing model.layers.1.*unexpected model.layers.7"):
        await tied.keeper.update(manifest, in_flight=False)
    completion = await complete(tied.engine, SHARED_PROMPT)
    assert worst_difference(tied.weights, SHARED_PROMPT, completion) < TOLERANCE
    await tied.publish(seed=34)


async def test_a_load_that_breaks_halfway_stops_sampling_until_one_succeeds(tied: Bench) -> None:
    """Names are not checked here, so the model itself finds what was not written, too late to keep the old weights:
    what runs is aborted, nothing is sampled, and the next version puts everything right."""
    tensors = [(n, t) for n, t in named_tensors(tied.model.fresh(35)) if "layers.2.self_attn.k_proj" not in n]
    manifest = tied.transport.offer(build(next(tied._versions), tied.keeper._run, tensors), tensors)
    known, tied.engine._checkpoint = tied.engine._checkpoint, type(tied.engine._checkpoint)({}, True, frozenset())
    running = asyncio.create_task(complete(tied.engine, SHARED_PROMPT[:40], max_new_tokens=270, ignore_eos=True))
    await _until_running(tied)
    with pytest.raises(UpdateFailed, match=r"left parameters unwritten: model.layers.2.self_attn.qkv_proj"):
        await tied.keeper.update(manifest, in_flight=True)
    assert (await running).finish == "aborted"
    with pytest.raises(EngineError, match="no usable weights"):
        await complete(tied.engine, SHARED_PROMPT)
    tied.engine._checkpoint = known
    await tied.publish(seed=36)
    completion = await complete(tied.engine, SHARED_PROMPT)
    assert worst_difference(tied.weights, SHARED_PROMPT, completion) < TOLERANCE


async def test_two_updates_at_once_end_with_the_newer(bench: Bench) -> None:
    """P-13: serialised, while requests run."""
    first, second = bench.model.fresh(41), bench.model.fresh(42)
    manifests = [bench.offer(first), bench.offer(second)]
    running = [asyncio.create_task(complete(bench.engine, SHARED_PROMPT, seed=s)) for s in range(4)]
    await asyncio.gather(*(bench.keeper.update(m, in_flight=True) for m in manifests))
    await asyncio.gather(*running)
    bench.weights = second
    assert bench.engine.version == manifests[1].version
    completion = await complete(bench.engine, SHARED_PROMPT)
    assert worst_difference(second, SHARED_PROMPT, completion) < TOLERANCE
    with pytest.raises(StaleVersion):
        await bench.keeper.update(manifests[0], in_flight=False)


async def test_weights_that_are_not_numbers_give_an_error_and_no_sample(tied: Bench) -> None:
    """P-13: NaN in the weights, and recovery."""
    weights = tied.model.fresh(51)
    with torch.no_grad():
        weights.model.norm.weight.fill_(float("nan"))
    await tied.keeper.update(tied.offer(weights), in_flight=False)
    with pytest.raises(EngineError, match="log-prob of token 0 is nan"):
        await complete(tied.engine, SHARED_PROMPT[:8])
    await tied.publish(seed=52)
    completion = await complete(tied.engine, SHARED_PROMPT)
    assert worst_difference(tied.weights, SHARED_PROMPT, completion) < TOLERANCE
