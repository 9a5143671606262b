"""CLIP beside transformers' own, on random tiny weights."""

import numpy as np
import pytest
import transformers

from models.clip.checkpoint import config_of
from models.clip.preprocess import cropped
from sbjax.rewards.clip_judge import ClipJudge
from tests import tiny_clip

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
pytestmark = pytest.mark.parity


def saved(path, act, wide):
  """transformers' model with tables that count, saved with a tokenizer."""
  torch.manual_seed(0)
  config = transformers.CLIPConfig(
    text_config={
      "vocab_size": 258,
      "hidden_size": 16,
      "intermediate_size": 40,
      "num_hidden_layers": 2,
      "num_attention_heads": 2,
      "max_position_embeddings": 16,
      "hidden_act": act,
      "eos_token_id": 257,
      "bos_token_id": 256,
    },
    vision_config={
      "hidden_size": wide,
      "intermediate_size": 56,
      "num_hidden_layers": 3,
      "num_attention_heads": 4,
      "image_size": 28,
      "patch_size": 7,
      "hidden_act": act,
    },
    projection_dim=12,
  )
  model = transformers.CLIPModel(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.2 * torch.randn_like(parameter))
  model.save_pretrained(path)
  tiny_clip.write_tokenizer(path)
  return model


@pytest.mark.parametrize(("act", "wide"), [("gelu", 24), ("quick_gelu", 16)])
def test_cosines_equal_those_of_transformers(tmp_path, act, wide):
  theirs = saved(tmp_path, act, wide)
  if act == "gelu":  # the same weights as torch itself writes them
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
  video = np.random.default_rng(0).integers(0, 256, (3, 41, 30, 3), dtype=np.uint8)
  judge = ClipJudge(str(tmp_path), hps=False, frames=3)
  processor = transformers.CLIPImageProcessorPil(
    size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
  )
  pixels = processor(images=list(video), return_tensors="pt")["pixel_values"]
  np.testing.assert_allclose(np.asarray(cropped(video, side=28)), pixels.numpy(), atol=2e-6)
  for prompt in ("A red seven moves.", "x", "far more words than the context has room for"):
    ids = torch.from_numpy(judge._tokens([prompt])).long()
    with torch.inference_mode():
      made = theirs(input_ids=ids, pixel_values=pixels)
    wanted = (made.image_embeds @ made.text_embeds.T)[:, 0].numpy()
    assert np.ptp(wanted) > 1e-3
    np.testing.assert_allclose(judge.cosines(video, prompt), wanted, atol=1e-4, rtol=0)


def test_sizes_that_a_config_leaves_out_are_those_of_transformers(tmp_path):
  transformers.CLIPConfig().save_pretrained(tmp_path)
  full = config_of(tmp_path)
  (tmp_path / "config.json").write_text('{"model_type": "clip"}')
  short = config_of(tmp_path)
  assert full == short
