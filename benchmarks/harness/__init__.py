"""The shared parts of the benchmarks: problems, their operators, timing, checks and reports.

    users       the calls that published models make; user_calls prepares and times them
    problems    other named shapes and their variants
    operators   fresh inputs of a problem, its passes, the bytes they move, results in fp64
    models      models that are timed as a whole
    timing      alternating runs, as median and quartiles; workers time in separate processes
    ceilings    the limits of the machine
    peers       other kernels, and the scan as textbooks write it
    records     rows as data, and the JSON files that hold them
    report      tables on the console; plots draws them

Only report and plots need more than PyTorch, and only operators, models, user_calls and records
need the library.
"""
