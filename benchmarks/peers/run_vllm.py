"""Runner: vLLM on a CPU, its engine in this process. --model is a Hugging Face folder; --kind a torch dtype.

Contexts of decode cells stay in its prefix cache after they were read once; no prompt of a prefill cell is sent twice.
It compiles the model at its start, which takes minutes, and gives no scores of the whole vocabulary: no quality.
"""

import itertools
import os

import line_loop

CORES = sorted(os.sched_getaffinity(0))  # whoever starts this has pinned it
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: 16 contexts of 1,024 tokens in float32 and some prompts
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

import vllm  # noqa: E402 it reads the environment when it is imported
from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402

MAX_ROWS = 16
MAX_TOKENS = 4096  # of one sequence, and of one step


class Engine:
    def __init__(self, options: line_loop.Options) -> None:
        self._options = options
        self._llm = LLM(
            options.model,
            dtype=options.kind,
            max_model_len=MAX_TOKENS,
            max_num_seqs=MAX_ROWS,
            max_num_batched_tokens=MAX_TOKENS,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._ids = itertools.count(1)
        self._prompts: line_loop.Tokens = []
        self._is_read: set[int] = set()

    def hello(self) -> line_loop.Hello:
        stored = os.path.getsize(os.path.join(self._options.model, "model.safetensors"))  # float32
        return line_loop.Hello(
            engine="vllm",
            version=vllm.__version__,
            precision=self._options.kind,
            kv=self._options.kind,
            weight_bytes=stored if self._options.kind == "float32" else stored // 2,
            note="compiled at its start",
        )

    def contexts(self, tokens: line_loop.Tokens) -> float:
        self._prompts = tokens
        return 0.0

    def prefill(self, tokens: line_loop.Tokens) -> float:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        return line_loop.timed(lambda: self._llm.generate(prompts, _greedy(1), use_tqdm=False))[0]

    def decode(self, batch: int, context: int, steps: int) -> float:
        for row in range(batch):
            if row not in self._is_read:  # the longest contexts; shorter ones are their beginnings
                self.prefill([self._prompts[row]])
                self._is_read.add(row)
        engine = self._llm.llm_engine
        for row in range(batch):
            prompt = TokensPrompt(prompt_token_ids=self._prompts[row][:context])
            engine.add_request(f"decode-{next(self._ids)}", prompt, _greedy(steps + 3))
        seconds, started = list[float](), set[str]()
        while engine.has_unfinished_requests():
            was_full = len(started) == batch
            duration, outputs = line_loop.timed(engine.step)
            started |= {each.request_id for each in outputs if each.outputs and each.outputs[0].token_ids}
            if was_full and len(outputs) == batch:
                seconds.append(duration)
        if len(seconds) < steps + 1:
            raise RuntimeError(f"{len(seconds)} full steps of {batch} rows, {steps + 1} were due")
        return sum(seconds[1 : steps + 1])

    def quality(self, tokens: line_loop.Tokens, path: str) -> float:
        raise NotImplementedError("it gives no scores of the whole vocabulary")


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
    )


if __name__ == "__main__":
    line_loop.run(__doc__, Engine)
