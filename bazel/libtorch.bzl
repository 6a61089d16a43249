"""Finds LibTorch and makes it the repository @libtorch."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

# Folders, not globs: ten thousand files would each cost a link in every
# action's sandbox.
cc_library(
    name = "libtorch",
    srcs = [
        "lib/libc10.so",
        "lib/libtorch_cpu.so",
    ],
    hdrs = [
        "cuda_include",
        "include",
    ],
    includes = [
        "cuda_include",
        "include",
        "include/torch/csrc/api/include",
    ],
    linkopts = [{linkopts}],
)

cc_library(
    name = "libtorch_cuda",
    linkopts = [{cuda_linkopts}],
    deps = [":libtorch"],
)
"""

def _quoted(options):
    return ", ".join(["\"%s\"" % option for option in options])

def _loader_paths(folder):
    return ["-L" + folder, "-Wl,-rpath," + folder, "-Wl,-rpath-link," + folder]

def _libtorch_impl(ctx):
    # Named here so that a changed pin looks again.
    for label in ctx.attr._scripts:
        ctx.path(label)
    ctx.report_progress("finding LibTorch, or fetching the pinned wheel")
    found = ctx.execute(
        ["bash", ctx.path(ctx.attr._find)],
        timeout = 3600,
    )
    if found.return_code != 0:
        fail("LibTorch was not found and not fetched:\n" + found.stderr)
    root, cuda_runtime = found.stdout.split("\n")[:2]

    ctx.symlink(root + "/include", "include")
    ctx.symlink(root + "/lib", "lib")
    linkopts = _loader_paths(root + "/lib")
    if cuda_runtime:
        linkopts += _loader_paths(cuda_runtime)
        linkopts += ["-l:libcudart.so.13", "-l:libcupti.so.13"]

    # The CUDA toolkit's headers are there for every target, so that a build
    # with --config=cuda takes all other objects from the cache.
    toolkit = ctx.path(ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    cuda_linkopts = ["-ltorch_cuda", "-lc10_cuda", "-l:libcudart.so.13"]
    if toolkit.get_child("include").exists:
        ctx.symlink(toolkit.get_child("include"), "cuda_include")
        cuda_linkopts += _loader_paths(str(toolkit.get_child("lib64")))
        cuda_linkopts.append("-lnccl")
    else:
        ctx.file("cuda_include/none.h", "")

    # libtorch_cuda's own libraries come from wherever the machine has them.
    cuda_linkopts.append("-Wl,--allow-shlib-undefined")
    ctx.file("BUILD", _BUILD.format(
        linkopts = _quoted(linkopts),
        cuda_linkopts = _quoted(cuda_linkopts),
    ))

libtorch_repository = repository_rule(
    doc = "LibTorch as bazel/find_libtorch.sh finds it, and the CUDA toolkit.",
    implementation = _libtorch_impl,
    environ = ["CUDA_HOME", "FULLSHARD_CACHE", "FULLSHARD_LIBTORCH"],
    attrs = {
        "_find": attr.label(default = "//bazel:find_libtorch.sh"),
        "_scripts": attr.label_list(default = [
            "//bazel:fetch_wheels.sh",
            "//bazel:requirements/cuda_runtime.txt",
            "//bazel:requirements/libtorch.txt",
        ]),
    },
)
