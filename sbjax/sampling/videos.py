"""Makes the videos of a sampling request, one after another, in this process."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float

from sbjax import files
from sbjax.compilation import cache_dir, use_cache
from sbjax.report.console import Progress
from sbjax.runtime.evaluation import evaluation_seed
from sbjax.sampling import models as models_lib
from sbjax.sampling.chunks import generate_chunks
from sbjax.sampling.script import Cue, Director, Script, director_of
from sbjax.sampling.streaming import Event, stream_video
from sbjax.settings import Settings


@dataclasses.dataclass(frozen=True)
class VideoRequest:
  """What is to be made.

  Attributes:
    settings: model, video length, frames per second.
    adapter: flat LoRA weights; None for the model without one.
    adapter_name: what the record calls it.
    scripts: prompts and their switches.
    seeds: videos of each script.
    interactive: makes the director of a script, with which the user's lines replace its switches;
      None plays the script.
    out: folder for the results.
  """

  settings: Settings
  adapter: Float[np.ndarray, " parameters"] | None
  adapter_name: str
  scripts: tuple[Script, ...]
  seeds: tuple[int, ...]
  interactive: Callable[[Script], Director] | None
  out: Path


def make_videos(request: VideoRequest, say: Callable[[str], None] = print) -> list[Path]:
  """Makes all videos and writes `videos.jsonl`, a line as soon as each is done.

  Args:
    request: what is to be made.
    say: shows a sentence to the user.

  Returns:
    The mp4 files.

  Raises:
    ValueError: weights that cannot be used.
    OutputError: the disk refuses.
    RunFailed: decoding takes too long.
  """
  settings = request.settings
  use_cache(cache_dir())
  say("loading models")
  asked = [p for s in request.scripts for p in (s.prompt, *(x.prompt for x in s.switches))]
  models = models_lib.load(settings, asked, request.adapter)
  runtime = settings.runtime
  # The first chunk compiles, and nothing is warmed up here.
  timeout_s = max(runtime.startup_timeout_s, runtime.task_timeout_s)
  written, records = [], []
  for number, script in enumerate(request.scripts):
    for seed in request.seeds:
      path = request.out / f"video_{number:03d}_seed_{seed}.mp4"
      say(f"{path}: {script.prompt}")
      director = _Recorder(
        request.interactive(script)
        if request.interactive
        else director_of(script, models.generator.sampler.frames_per_chunk)
      )
      chunks = generate_chunks(
        models.generator,
        director,
        chunks=models.chunks,
        seed=evaluation_seed(seed, script.prompt),
      )
      with Progress(f"video {len(written) + 1}, chunk", models.chunks) as progress:

        def tell(event: Event, progress: Progress = progress) -> None:
          if event.kind == "written":
            progress.advance(f"{event.frames} frames on their way to disk")

        frames = stream_video(
          chunks, models.decode, path, settings.report.fps, timeout_s=timeout_s, tell=tell
        )
      written.append(path)
      records.append(
        {
          "file": path.name,
          "prompt": script.prompt,
          "switches": director.switches,
          "seed": seed,
          "adapter": request.adapter_name,
          "frames": frames,
          "fps": settings.report.fps,
        }
      )
      lines = "".join(json.dumps(record) + "\n" for record in records)
      files.atomic_write(request.out / "videos.jsonl", lines)
  facts = json.dumps(dataclasses.asdict(settings), indent=1)
  files.atomic_write(request.out / "config.json", facts + "\n")
  return written


class _Recorder:
  """A director that remembers which switches took place, typed ones included."""

  def __init__(self, director: Director):
    self._director = director
    self.switches: list[dict[str, int | str]] = []

  def __call__(self, frame: int) -> Cue | None:
    cue = self._director(frame)
    if cue is not None and cue.switched:
      self.switches.append({"frame": frame, "prompt": cue.prompt})
    return cue
