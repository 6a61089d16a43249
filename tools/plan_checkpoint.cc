#include "fullshard/tools/plan_checkpoint.h"

#include <map>
#include <regex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/status.h"

namespace fullshard {
namespace {

constexpr char kRoot[] = "root";
// Up to the first part that is a number.
constexpr char kUpToANumber[] = R"((?:[^.]*\.)*?[0-9]+(?=\.))";

absl::StatusOr<std::regex> compile(const std::string& pattern) {
  try {
    return std::regex(pattern);
  } catch (const std::regex_error& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("--unit: expected a regular expression, got '", pattern,
                     "': ", error.what()));
  }
}

int64_t numel_of(const CheckpointTensor& tensor) {
  int64_t numel = 1;
  for (int64_t size : tensor.sizes) numel *= size;
  return numel;
}

absl::StatusOr<PlanParameter> parameter_of(
    const CheckpointTensor& tensor,
    std::optional<at::ScalarType> storage_dtype) {
  if (!tensor.scalar_type.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", tensor.name, "': LibTorch has no dtype ",
                     tensor.dtype, ", so it cannot be trained"));
  }
  PlanParameter parameter;
  parameter.name = tensor.name;
  parameter.numel = numel_of(tensor);
  parameter.dtype = *tensor.scalar_type;
  const bool floating = c10::isFloatingType(parameter.dtype);
  if (floating) parameter.dtype = storage_dtype.value_or(parameter.dtype);
  parameter.trainable = floating || c10::isComplexType(parameter.dtype);
  return parameter;
}

}  // namespace

absl::StatusOr<std::vector<PlanUnit>> units_of_checkpoint(
    const CheckpointReader& checkpoint,
    const std::optional<std::string>& unit_pattern,
    std::optional<at::ScalarType> storage_dtype) {
  FS_ASSIGN_OR_RETURN(const std::regex pattern,
                      compile(unit_pattern.value_or(kUpToANumber)));
  PlanUnit root;
  root.name = kRoot;
  std::vector<PlanUnit> units;
  std::map<std::string, size_t> place;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    if (tensor.tied_to.has_value()) continue;
    FS_ASSIGN_OR_RETURN(PlanParameter parameter,
                        parameter_of(tensor, storage_dtype));
    std::smatch match;
    if (!std::regex_search(tensor.name, match, pattern,
                           std::regex_constants::match_continuous) ||
        match.length() == 0) {
      root.parameters.push_back(std::move(parameter));
      continue;
    }
    const auto [found, is_new] = place.emplace(match.str(), units.size());
    if (is_new) units.push_back({match.str(), {}});
    units[found->second].parameters.push_back(std::move(parameter));
  }
  if (units.empty() && unit_pattern.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--unit: '", *unit_pattern, "' matches the beginning of no name in ",
        checkpoint.path()));
  }
  if (!root.parameters.empty()) {
    root.encloses_others = !units.empty();
    units.insert(units.begin(), std::move(root));
  }
  if (units.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint.path(), ": no tensors"));
  }
  return units;
}

}  // namespace fullshard
