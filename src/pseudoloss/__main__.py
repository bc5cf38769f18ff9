import sys

from pseudoloss.cli import main

sys.exit(main())
