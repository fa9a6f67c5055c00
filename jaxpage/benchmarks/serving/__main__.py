"""``python -m jaxpage.benchmarks.serving``: the same as ``jaxpage bench serve``."""

import sys

from jaxpage.benchmarks.serving.main import main

sys.exit(main())
