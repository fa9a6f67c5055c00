"""``python -m jaxpage``: the ``jaxpage`` command where its script is not on the path."""

import sys

from jaxpage.cli import main

sys.exit(main())
