"""Performance model: data sheets, rooflines, calibration, live fits."""
