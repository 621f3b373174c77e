# SPDX-License-Identifier: Apache-2.0
"""Makes scripts/demo.py importable, which serves the models."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
