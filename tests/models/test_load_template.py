"""The errors of a chat template that fails, in a directory whose files have digests."""

from __future__ import annotations

import pytest

import kvjax
from kvjax.errors import KvjaxError
from kvjax.models import checkpoint
from kvjax.models.model import random_model
from tests.models.test_checkpoint import CONFIG


def test_a_broken_template_is_mended_in_the_source_since_a_mended_copy_is_refused(tmp_path):
    params, files = random_model(CONFIG).params, {"chat_template.jinja": b"{{ nothing.at_all }}"}
    checkpoint.save(tmp_path / "model", CONFIG, params, extra_files=files)
    template = kvjax.load(tmp_path / "model").chat_template
    with pytest.raises(
        KvjaxError, match=r"mend chat_template.jinja .* in the source of the model and convert it again"
    ):
        template.render([[{"role": "user", "content": "a"}]])
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(KvjaxError, match="chat_template.jinja is missing or not what was written"):
        kvjax.load(tmp_path / "model")
