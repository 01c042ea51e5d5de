"""One of the study's processes: the package run as a module, with the file of its work. Its answer lies beside."""
import sys

from benchmarks.studies.startup.process import main

sys.exit(main(sys.argv[1:]))
