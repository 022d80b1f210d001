"""``shoal profile --calibrate``: measure this machine's rates under sustained load and save them for predictions."""

from shoal.prove.calibrate.machine import Measured as Measured
from shoal.prove.calibrate.machine import calibrate as calibrate
