"""Optimisers and schedules for anybody's training loop; they know no jobs and no files.

Import from the modules, for example `from tula_hpc.optim.ags import TulaOptimizer`: this file stays empty, so that
`tula_hpc.optim.schedules` works without torch.
"""
