"""Runner: OpenVINO GenAI's continuous batching. --model is a folder with its model and tokenizer files.

--kind COMPUTE:KV, the two precision hints: f32:f32, bf16:bf16, f32:u8. Contexts of decode cells stay in its prefix
cache after they were read once; no prompt of a prefill cell is sent twice. Scores come of the same model, run plainly.
"""

import itertools
import os

import line_loop
import numpy as np
import openvino as ov
import openvino_genai as genai

MAX_ROWS = 16
KV_GIB = 2  # 16 contexts of 1,024 tokens in float32 and some prompts


class Engine:
    def __init__(self, options: line_loop.Options) -> None:
        self._options = options
        self._compute, self._kv = options.kind.split(":")
        self._hints = {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": self._compute,
            "KV_CACHE_PRECISION": self._kv,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = KV_GIB
        scheduling.max_num_batched_tokens = 4096
        scheduling.max_num_seqs = MAX_ROWS
        scheduling.enable_prefix_caching = True
        scheduling.dynamic_split_fuse = True
        self._pipeline = genai.ContinuousBatchingPipeline(self._options.model, scheduling, "CPU", self._hints)
        self._ids = itertools.count(1)
        self._prompts: line_loop.Tokens = []
        self._is_read: set[int] = set()

    def hello(self) -> line_loop.Hello:
        weights = os.path.getsize(os.path.join(self._options.model, "openvino_model.bin"))
        return line_loop.Hello(
            engine="openvino",
            version=f"genai {genai.get_version().split('-')[0]}",
            precision=os.path.basename(self._options.model).rpartition("-")[2],
            kv=self._kv,
            weight_bytes=weights,
            note=f"computes in {self._compute}",
        )

    def contexts(self, tokens: line_loop.Tokens) -> float:
        self._prompts = tokens
        return 0.0

    def prefill(self, tokens: line_loop.Tokens) -> float:
        prompts = [ov.Tensor(np.array(tokens, np.int64))]
        return line_loop.timed(lambda: self._pipeline.generate(prompts, [_greedy(1)]))[0]

    def decode(self, batch: int, context: int, steps: int) -> float:
        for row in range(batch):
            if row not in self._is_read:  # the longest contexts; shorter ones are their beginnings
                self._pipeline.generate([ov.Tensor(np.array([self._prompts[row]], np.int64))], [_greedy(1)])
                self._is_read.add(row)
        handles = [
            self._pipeline.add_request(
                next(self._ids), ov.Tensor(np.array([self._prompts[row][:context]], np.int64)), _greedy(steps + 3)
            )
            for row in range(batch)
        ]
        seconds, started = list[float](), 0
        while self._pipeline.has_non_finished_requests():
            was_full = started == batch
            duration, _ = line_loop.timed(self._pipeline.step)
            written = sum(1 for handle in handles if handle.can_read() and handle.read())
            started = max(started, written)
            if was_full and written == batch:
                seconds.append(duration)
        if len(seconds) < steps + 1:
            raise RuntimeError(f"{len(seconds)} full steps of {batch} rows, {steps + 1} were due")
        return sum(seconds[1 : steps + 1])

    def quality(self, tokens: line_loop.Tokens, path: str) -> float:
        model = ov.Core().compile_model(os.path.join(self._options.model, "openvino_model.xml"), "CPU", self._hints)
        ids = np.array(tokens, np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(),
            "beam_idx": np.arange(len(ids), dtype=np.int32),
        }
        request = model.create_infer_request()
        seconds, _ = line_loop.timed(lambda: request.infer(inputs))
        np.save(path, request.get_tensor("logits").data.astype(np.float32))
        return seconds


def _greedy(num_tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos, config.do_sample = True, False
    return config


if __name__ == "__main__":
    line_loop.run(__doc__, Engine)
