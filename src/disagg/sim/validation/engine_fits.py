"""What engines add to kernels, from the calibrating halves of whole steps and closed loops.

Values of a fit: seconds per step, per sequence of it, per prompt token and, where asked, per all-reduce.
"""

from collections.abc import Callable, Sequence

from disagg.sim.hardware import catalogue
from disagg.sim.hardware.roofline import RooflineModel
from disagg.sim.validation.closed_form import closed_loop_tpot_s
from disagg.sim.validation.fitting import Sample
from disagg.sim.validation.foreign_tables import SPLITWISE_MODELS, silicon_points, splitwise_points
from disagg.sim.validation.step_cases import prompt_s, stream_s

ENGINE_START = (1e-3, 1e-5, 1e-6, 1e-5)
ENGINE_LIMITS = (1.0, 1.0, 1.0, 1.0)


def splitwise_samples() -> list[Sample]:
    """Whole steps of both phases: the points of odd order."""
    samples = []
    for point in splitwise_points():
        if point.order % 2 == 1:
            group = point.group
            shape = catalogue.model_shape(SPLITWISE_MODELS[group.model])
            kernels = RooflineModel(shape, catalogue.accelerator(group.hardware), tp=group.tp)
            reduces = 2 * kernels.num_layers if group.tp > 1 else 0
            if point.answer == 128:
                alone = prompt_s(kernels, point.prompt, point.batch)
                terms = (1, point.batch, point.prompt * point.batch, reduces)
                samples.append(Sample(point.prompt_s, _added(alone, terms)))
            alone = stream_s(kernels, point.batch, point.prompt + point.answer // 2)
            samples.append(Sample(point.token_s, _added(alone, (1, point.batch, 0, reduces))))
    return samples


def silicon_samples(backend: str) -> list[Sample]:
    """TPOT of closed loops: the concurrencies of even order, where prompts join decoding steps."""
    samples = []
    for point in silicon_points():
        if point.order % 2 == 0 and point.group.backend == backend:
            worker = point.group.worker()
            kernels = RooflineModel(worker.model, worker.device, tp=worker.tp, weights=worker.weights, kv=worker.kv)
            alone = closed_loop_tpot_s(kernels, point.group.prompt, point.group.answer, point.concurrency)
            prompts = point.concurrency * point.group.prompt / point.group.answer
            # The closed form adds a sequence's own cost once more for each prompt that joins.
            rows = point.concurrency + point.concurrency / point.group.answer
            samples.append(Sample(point.tpot_s, _added(alone, (1, rows, prompts))))
    return samples


def _added(alone: float, terms: Sequence[float]) -> Callable[[Sequence[float]], float]:
    return lambda values: alone + sum(value * term for value, term in zip(values, terms, strict=True))
