"""``shoal profile --calibrate``: measure this machine's rates under sustained load and save them for predictions."""

from shoal.prove.calibrate.machine import CalibrationReport as CalibrationReport
from shoal.prove.calibrate.machine import calibrate as calibrate
