"""``shoal profile --calibrate``: what this machine reaches under sustained load, measured and kept for predictions."""

from shoal.prove.calibrate.machine import calibrate as calibrate
from shoal.prove.calibrate.report import Measured as Measured
