"""The rules that every package of FullShard uses."""

_COPTS = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]

def _copts(own, deps):
    copts = _COPTS + own
    if "//third_party:libtorch_cuda" in deps:
        copts = copts + select({
            "//bazel:cuda": ["-DUSE_C10D_NCCL"],
            "//conditions:default": [],
        })
    return copts

def _include_prefix():
    package = native.package_name()
    return "fullshard/" + package if package else "fullshard"

def fullshard_cc_library(name, srcs = [], hdrs = [], deps = [], copts = [], **kwargs):
    """A library whose headers are included as "fullshard/<package>/<name>.h"."""
    native.cc_library(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        deps = deps,
        copts = _copts(copts, deps),
        include_prefix = _include_prefix(),
        strip_include_prefix = "",
        linkstatic = True,
        **kwargs
    )

def fullshard_cc_binary(name, srcs = [], deps = [], copts = [], **kwargs):
    native.cc_binary(
        name = name,
        srcs = srcs,
        deps = deps,
        copts = _copts(copts, deps),
        **kwargs
    )

def fullshard_cc_test(name, srcs = [], deps = [], copts = [], env = {}, **kwargs):
    """A GoogleTest binary with a main of its own and one thread per process."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    threads.update(env)
    native.cc_test(
        name = name,
        srcs = srcs,
        deps = deps + ["//third_party:gtest_main"],
        copts = _copts(copts, deps),
        env = threads,
        linkstatic = True,
        **kwargs
    )

def fullshard_cc_benchmark(name, srcs = [], deps = [], copts = [], tags = [], **kwargs):
    """A google-benchmark binary; `bazel build //...` leaves it out."""
    native.cc_binary(
        name = name,
        srcs = srcs,
        deps = deps + ["//third_party:benchmark"],
        copts = _copts(copts, deps),
        tags = tags + ["manual"],
        **kwargs
    )
