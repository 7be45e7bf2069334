"""The public benchmarks that are read from local files (`Spec.data`), by name."""

from __future__ import annotations

from kvjax.eval.tasks.case import Maker
from kvjax.eval.tasks.gsm8k import GSM8K
from kvjax.eval.tasks.longbench import LONGBENCH
from kvjax.eval.tasks.xsum import XSUM

PUBLIC: dict[str, Maker] = {**LONGBENCH, **GSM8K, **XSUM}
