"""Everything outside this repository that a build of FullShard needs."""

load("//bazel:libtorch.bzl", "libtorch_repository")

def _rules_cc_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = \"rules_cc\")\n")
    ctx.file("BUILD", "")
    ctx.file("cc/BUILD", "")
    ctx.symlink(ctx.attr._defs, "cc/defs.bzl")

_rules_cc_repository = repository_rule(
    implementation = _rules_cc_impl,
    attrs = {"_defs": attr.label(default = "//bazel:rules_cc_defs.bzl")},
)

def _coverage_tools_impl(ctx):
    ctx.file("WORKSPACE", "workspace(name = \"remote_coverage_tools\")\n")
    ctx.file("none.sh", "#!/bin/sh\n", executable = True)
    ctx.file("BUILD", "\n".join([
        "sh_binary(name = \"%s\", srcs = [\"none.sh\"], visibility = [\"//visibility:public\"])" % name
        for name in ["coverage_report_generator", "lcov_merger"]
    ]))

_coverage_tools_repository = repository_rule(
    implementation = _coverage_tools_impl,
)

def fullshard_dependencies():
    """Registers what FullShard needs, unless the workspace already has it.

    Call it from WORKSPACE, here and in a consumer. Debian's Bazel comes with
    rules_java and rules_proto as packages, and asks for rules_cc and
    remote_coverage_tools by name: local stand-ins keep the build offline.
    """
    known = native.existing_rules()
    if "rules_cc" not in known:
        _rules_cc_repository(name = "rules_cc")
    if "remote_coverage_tools" not in known:
        _coverage_tools_repository(name = "remote_coverage_tools")
    for language in ["java", "proto"]:
        if "rules_" + language not in known:
            native.local_repository(
                name = "rules_" + language,
                path = "/usr/share/bazel/rules/" + language,
            )
    if "libtorch" not in known:
        libtorch_repository(name = "libtorch")
