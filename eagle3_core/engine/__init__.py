"""Run SGLang, let it generate, and read hidden states out of it; the same code path on a CPU and on a GPU.

Nothing here imports torch, transformers or sglang at module level except `hf.py`; importing this package costs nothing.

What other packages use::

    from eagle3_core.engine.effective import validate
    from eagle3_core.engine.launch import LaunchPlan
    from eagle3_core.engine.platform import resolve_device          # "auto" -> "cpu" | "cuda", without importing torch
    from eagle3_core.engine.fingerprint import fingerprint, require_known_good   # light: reads sources, imports nothing
    from eagle3_core.engine.server import SglangServer
    from eagle3_core.engine.client import EngineClient, Sampling, Generation, ServerCounters
    from eagle3_core.engine.spool import CapturedSample
    from eagle3_core.engine.hf import TransformersCapture           # heavy: imports torch and transformers

Plans (pure; `serving` is `config.ServingConfig`, `shape` is `config.evaluation.DraftShape`)::

    plan = LaunchPlan.serve(target, dtype, serving)                              # no speculation
    plan = LaunchPlan.speculate(target, dtype, serving, drafter, shape)          # EAGLE3
    plan = LaunchPlan.capture(target, dtype, serving, aux_layers, max_sample_tokens, prefill_tokens)   # ids from 0
    plan.argv(port)     # tuple[str, ...]: printable, testable
    plan.device         # "cpu" | "cuda"
    validate([plan])    # seconds, in a subprocess, against the installed SGLang -> the resolved fields of each
                        # raises EngineArgsError (one line, with the right flag's name for a wrong one)

Server::

    with SglangServer.of_stage(plan, context) as server:  # or SglangServer(plan, log=path, ...)
        server.url, server.pid, server.ready_s, server.effective     # effective = arguments the server really runs with
        with server.client() as client: ...

    Entering raises EngineStartError (log's last meaningful line), EngineArgsError or GpuBusyError (who holds the GPUs);
    leaving stops the whole process tree (TERM, 10 s, KILL) and proves that port, processes and GPU memory are gone. If
    the server dies, the next client call raises EngineDiedError within about a second.

Client (`input_ids` in, `output_ids` out: the server's own token ids, nothing is tokenised here)::

    sampling = Sampling(max_new_tokens=256, temperature=0.0, ignore_eos=False)
    for generation in client.generate(prompts, sampling, concurrency=16):   # prompts: Sequence[Sequence[int]]
        generation.index              # which prompt; yielded as they finish, not in order
        generation.output_ids         # list[int], EOS included when the model wrote it
        generation.finish_reason      # "stop" | "length"
        generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens, generation.latency_s
        generation.spec_verify_ct         # verify passes, None when the server does not speculate
        generation.spec_accept_histogram  # [j] = verify passes that accepted exactly j draft tokens; None without
    client.generate_all(prompts, sampling, concurrency=16) -> list[Generation]   # the same, in order
    client.counters() -> ServerCounters(avg_spec_accept_length | None, last_gen_throughput | None)
    client.server_info() -> dict
    client.flush_cache()              # forget cached prefixes, so that two measurements start alike

    for sample in client.capture(samples):  # samples: Sequence[Sequence[int]] of whole token ids
        sample.index                  # which sample; in order
        sample.input_ids              # torch int64 [T], read back from the engine and equal to what was sent
        sample.aux_hidden_states      # torch [T, A * D], low layer first, in the target's dtype
        sample.last_hidden_state      # torch [T, D], POST-norm
        raises CaptureMismatchError when ids or row counts differ

    Samples share a prefill by their lengths alone (`prefills.py`): the same samples give the same bits.

    TransformersCapture(target, dtype, aux_layers, device="cpu").capture(samples)   # the same iterator, by transformers

Errors: EngineArgsError and EngineVersionError (fix), EngineStartError, EngineDiedError, CaptureMismatchError and
EngineUnreachableError (retry), all in `eagle3_core.errors`.

Lengths: SGLang refuses a request (EngineArgsError) when prompt + max_new_tokens exceeds the context, and a speculating
server counts num_draft_tokens on top: to serve the same requests with and without speculation, keep
prompt + max_new_tokens + num_draft_tokens within the target's max_position_embeddings. A capture server takes samples
up to the last position.

Environment the launcher sets for the plugin (`plugin.py`): `EAGLE3_CAPTURE_DIR`, `EAGLE3_CAPTURE_LAYERS` (outputs_of
ids, comma separated). On a CPU it also puts `cpu_site/` on PYTHONPATH.
"""
