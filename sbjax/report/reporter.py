"""Everything that a run tells: banner, progress, metrics, samples, timelines, summary."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sbjax.dataflow.graph import StepGraph
from sbjax.dataflow.plan import Plan
from sbjax.report import (
  console,
  evaluation,
  samples,
  summary,
  timeline,
  timeline_plot,
  waiting,
  writers,
)
from sbjax.runtime.driver import Driver
from sbjax.runtime.records import EvalResult, StepResult
from sbjax.state.workdir import Workdir

_SHOWN = ("generate", "decode", "judge", "forward", "replay", "backward")


class Reporter:
  """Writes a run's outputs into its workdir.

  Args:
    workdir: where things go.
    driver: its recipe and workers are described.
    resume_step: the step that the run continues from, or None for a new run.
  """

  def __init__(self, workdir: Workdir, driver: Driver, resume_step: int | None):
    self._workdir, self._driver = workdir, driver
    self._settings = driver.recipe.settings
    self._config = dataclasses.asdict(self._settings)
    self._writer = writers.open_writer(
      metrics=workdir.metrics,
      tensorboard=workdir.tensorboard,
      fps=self._settings.report.fps,
      resume_step=resume_step,
      extra=self._settings.report.writers,
      workdir=str(workdir.root),
      config=self._config,
    )
    self._writer.write_hparams(writers.flatten(self._config))
    self._progress = console.StepProgress(self._settings.total_steps)
    self._counts: dict[str, float] = {}
    self._ran: tuple[StepGraph, Plan | None] | None = None

  def say(self, text: str) -> None:
    """Prints one line."""
    print(text, flush=True)

  # The banner.

  def banner(self, first_step: int, notes: Sequence[str]) -> None:
    """Prints what is about to happen, before anything compiles."""
    settings, recipe = self._settings, self._driver.recipe
    geometry = recipe.geometry
    rows = []
    for slot in self._driver.slots:
      facts = self._driver.facts[slot.name]
      held = "policy, decoder, judge" if slot.group != "actor" else "policy, decoder"
      rows.append(
        console.DeviceRow(slot.name, slot.group, f"{facts['devices']} x {facts['device']}", held)
      )
    counts = self._driver.facts[self._driver.slots[0].name]["parameters"]
    models = [console.ModelRow(role, settings.model.name, n) for role, n in counts.items()]
    targets = recipe.lora.resolved
    stride = self._driver.pixel_stride
    print(
      console.banner(
        console.RunDescription(
          workdir=str(self._workdir.root),
          algorithm=settings.algorithm.name,
          scheme=settings.scheme,
          executor=settings.runtime.executor,
          seed=settings.seed,
          first_step=first_step,
          total_steps=settings.total_steps,
          devices=rows,
          models=models,
          video=f"{settings.model.frames} frames of "
          f"{geometry.width * stride} x {geometry.height * stride} px",
          chunks=geometry.chunks,
          chunk_tokens=geometry.tokens_per_chunk,
          denoising_steps=recipe.schedule.steps,
          trained_steps=recipe.trained,
          prompts_per_step=settings.rollout.prompts_per_step,
          group_size=settings.rollout.group_size,
          minibatches=settings.algorithm.minibatches,
          epochs=settings.algorithm.epochs,
          lora_layers=len(targets) * recipe.dit.num_layers,
          lora_targets=targets,
          lora_parameters=recipe.adapter_parameters,
          lora_rank=recipe.lora.rank,
          lora_alpha=recipe.lora.alpha,
          outputs=self._workdir.outputs(),
          notes=notes,
        )
      ),
      flush=True,
    )

  # Progress.

  def begin_step(self, step: int) -> None:
    """Starts the line of a step."""
    candidates = self._settings.candidates
    trained = candidates * self._settings.algorithm.epochs
    totals = {"generate": candidates, "decode": candidates, "judge": candidates}
    if not self._driver.scheme.forward_first:
      totals["replay"] = trained
    else:
      totals |= {"forward": trained, "backward": trained}
    self._counts = dict.fromkeys(totals, 0.0)
    self._progress.begin(step, totals)

  def on_progress(self, graph: StepGraph) -> None:
    """Moves the line of the step."""
    self._ran = graph, self._driver.plan  # after the step another plan may be in force
    done = dict.fromkeys(self._counts, 0.0)
    jobs = sum(len(task.jobs) for task in graph.tasks.values())
    blocks = max((len(task.blocks) for task in graph.tasks.values()), default=0)
    for task in graph.tasks.values():
      if task.kind in done and graph.is_done(task.id):
        if task.fused:
          done["replay"] += 1.0
        if task.kind == "judge":  # pairs are many more than candidates
          done["judge"] += len(task.jobs) / jobs * self._settings.candidates
        elif task.kind == "replay":  # a part of a split one counts as a part
          done["replay"] += len(task.blocks) / blocks
        else:
          done[task.kind] += sum(c >= 0 for c in task.candidates)
    for kind, count in done.items():
      if count > self._counts[kind]:
        self._progress.advance(kind, count - self._counts[kind])
        self._counts[kind] = count

  def videos_wanted(self, step: int) -> Sequence[int]:
    """Candidates whose videos the step's result should hold."""
    report = self._settings.report
    if not report.samples_every or step % report.samples_every:
      return ()
    size = self._settings.candidates
    count = min(report.samples, size)
    return sorted({i * size // count for i in range(count)}) if count else ()

  # Results.

  def step(self, result: StepResult) -> StepResult:
    """Writes a step's metrics, and its samples and timeline where they are due."""
    derived = timeline.span_metrics(
      result.spans,
      step_s=result.metrics["timing_s/step"],
      devices=len(self._driver.slots) * self._settings.runtime.devices_per_worker,
      waits=self._waits(result),
    )
    result = dataclasses.replace(result, metrics={**derived, **result.metrics})
    self._writer.write_scalars(result.step, result.metrics)
    if any(c.video is not None for c in result.candidates):
      report = self._settings.report
      samples.write_samples(
        self._workdir.samples, result.step, result.candidates, fps=report.fps, cap=report.samples
      )
      videos = samples.stacked(samples.chosen(result.candidates, report.samples))
      if videos is not None:
        self._writer.write_videos(result.step, {"samples": videos})
      self._timeline(result)
    self._writer.flush()
    self._progress.end(result)
    return result

  def _waits(self, result: StepResult) -> dict[str, tuple[waiting.Window, ...]] | None:
    graph, plan = self._ran or (None, None)
    if graph is None or plan is None:
      return None
    driver, step_s = self._driver, result.metrics["timing_s/step"]
    allowed = waiting.runners(driver.scheme, plan, driver.slots, result.spans)
    return waiting.reward_waits(result.spans, graph.tasks.values(), allowed, step_s)

  def _timeline(self, result: StepResult) -> None:
    self._workdir.timeline.mkdir(exist_ok=True)
    name = self._workdir.timeline / f"step_{result.step:06d}"
    timeline.write_trace(f"{name}.json", result.spans, scheme=self._settings.scheme)
    timeline_plot.write_timeline(
      f"{name}.png",
      result.spans,
      scheme=self._settings.scheme,
      step=result.step,
      step_s=result.metrics["timing_s/step"],
    )

  def evaluation(self, result: EvalResult) -> None:
    """Writes an evaluation and prints its table."""
    report = self._settings.report
    evaluation.write_evaluation(
      self._workdir.evaluation, result, fps=report.fps, cap=report.samples
    )
    self._writer.write_scalars(result.step, evaluation.scalars(result))
    self._writer.flush()
    print(evaluation.table(result), flush=True)

  def finish(self, steps: int, wall_s: float, status: str, advice: str) -> Mapping[str, Any]:
    """Writes `summary.json` and the reward curve, and says where they are."""
    settings = self._settings
    facts = summary.RunFacts(
      steps=steps,
      candidates_per_step=settings.candidates,
      seed=settings.seed,
      scheme=settings.scheme,
      wall_s=wall_s,
      chunk_tokens=self._driver.recipe.geometry.tokens_per_chunk,
      minibatches=settings.algorithm.minibatches,
      outputs=self._workdir.outputs(),
      next=advice,
      shares_of_colocated_step=self._colocated_shares(),
      status=status,
      extra={"warm_task_ms": self._warm_ms()},
    )
    lines = self._workdir.evaluation / "evaluation.jsonl"
    written = summary.write_summary(self._workdir.summary, facts, self._workdir.metrics, lines)
    rows = writers.read_jsonl(self._workdir.metrics)
    if rows:
      title = f"{settings.model.name}, {settings.algorithm.name}, {settings.scheme}"
      summary.write_reward_curve(self._workdir.reward_curve, rows, writers.read_jsonl(lines), title)
    print(f"summary      {self._workdir.summary}\nreward curve {self._workdir.reward_curve}")
    print(f"next         {advice}", flush=True)
    return written

  def _warm_ms(self) -> dict[str, float]:
    """Kind -> milliseconds of one warm task, the mean over groups, other workers busy alike."""
    warm = self._driver.warm
    if warm is None:
      return {}
    return {k: 1e3 * statistics.fmean(g.values()) for k, g in warm.seconds.items()}

  def _colocated_shares(self) -> dict[str, float] | None:
    """Shares of a colocated step's busy time: every candidate once through each kind.

    Its replay is the two-pass one: a forward and a backward task per candidate and epoch.
    """
    warm = self._warm_ms()
    if not {"generate", "decode", "judge", "forward", "backward"} <= set(warm):
      return None
    epochs = self._settings.algorithm.epochs
    busy = {
      "generate": warm["generate"],
      "decode": warm["decode"],
      "judge": warm["judge"],
      "replay": epochs * (warm["forward"] + warm["backward"]),
    }
    return {kind: ms / sum(busy.values()) for kind, ms in busy.items()}

  def close(self) -> None:
    """Closes the writers."""
    self._writer.close()
