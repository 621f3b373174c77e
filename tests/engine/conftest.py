# SPDX-License-Identifier: Apache-2.0
"""Makes scripts/demo.py importable, which serves the models."""

import signal
import sys
from pathlib import Path

# As Ctrl-C does: the servers that run are ended, too.
signal.signal(signal.SIGTERM, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parents[2]))
