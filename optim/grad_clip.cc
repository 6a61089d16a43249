#include "fullshard/optim/grad_clip.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "ATen/ops/cat.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/status.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/optim/shard_runs.h"
#include "fullshard/sharding/gradient_norm.h"
#include "fullshard/sharding/sharded_state.h"

namespace fullshard {
namespace {

using internal::FlatParameter;
using internal::norm_by_rows;
using internal::ShardedState;
using internal::ShardRun;

// A p-norm on its way: scale * sum^(1/p), of non-negative numbers. Powers are
// taken of numbers up to 1, so that no p overflows. Where the norm is infinite
// or not a number, `sum` is.
struct PartialNorm {
  double scale = 0;
  double sum = 0;

  // Brings `sum` to a scale that is no smaller.
  void rescale(double to, double p) {
    if (to == scale) return;
    if (std::isfinite(sum) && !std::isinf(p)) sum *= std::pow(scale / to, p);
    scale = to;
  }
  void add(PartialNorm other, double p) {
    const double common = std::max(scale, other.scale);
    rescale(common, p);
    other.rescale(common, p);
    sum += other.sum;
  }
  double value(double p) const {
    if (!std::isfinite(sum) || std::isinf(p)) {
      return std::isfinite(sum) ? scale : sum;
    }
    return scale * std::pow(sum, 1 / p);
  }
};

PartialNorm partial_norm(const at::Tensor& values, double p) {
  if (p == 1 || p == 2) {
    const double norm = norm_by_rows(values, p);
    return {1, p == 1 ? norm : norm * norm};
  }
  const double largest =
      norm_by_rows(values, std::numeric_limits<double>::infinity());
  if (!std::isfinite(largest)) return {0, largest};
  if (std::isinf(p) || largest == 0) return {largest, 0};
  constexpr int64_t kPiece = 1 << 20;
  PartialNorm norm{largest, 0};
  for (int64_t begin = 0; begin < values.numel(); begin += kPiece) {
    norm.sum +=
        values.narrow(0, begin, std::min(kPiece, values.numel() - begin))
            .to(at::kDouble)
            .abs_()
            .div_(largest)
            .pow_(p)
            .sum()
            .item<double>();
  }
  return norm;
}

void all_reduce(const ShardedState& state, std::vector<double>& values,
                c10d::ReduceOp::RedOpType operation) {
  if (state.shard_group()->getSize() == 1) return;
  at::Tensor host =
      at::zeros({static_cast<int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), host.data_ptr<double>());
  std::vector<at::Tensor> tensors = {host.to(state.groups().device())};
  c10d::AllreduceOptions options;
  options.reduceOp = operation;
  CollectiveScope scope("all_reduce of gradient norms", nullptr, 0);
  state.shard_group()->allreduce(tensors, options)->wait();
  host = tensors[0].cpu();
  std::copy_n(host.const_data_ptr<double>(), values.size(), values.begin());
}

// Adds up what the ranks of the shard group have. With p 1 and 2 the scale is
// 1 everywhere.
void combine_ranks(const ShardedState& state, double p,
                   std::vector<PartialNorm>& norms) {
  if (p != 1 && p != 2) {
    std::vector<double> scales;
    for (const PartialNorm& norm : norms) scales.push_back(norm.scale);
    all_reduce(state, scales, c10d::ReduceOp::MAX);
    for (size_t i = 0; i < norms.size(); ++i) norms[i].rescale(scales[i], p);
  }
  std::vector<double> sums;
  for (const PartialNorm& norm : norms) sums.push_back(norm.sum);
  all_reduce(state, sums, c10d::ReduceOp::SUM);
  for (size_t i = 0; i < norms.size(); ++i) norms[i].sum = sums[i];
}

// What each parameter counts for: key = group * number of modules + module.
class NormKeys {
 public:
  static absl::StatusOr<NormKeys> create(
      const std::vector<FlatParameter*>& flats,
      const GradNormOptions& options) {
    NormKeys keys;
    keys.num_groups_ = options.groups.size() + 1;
    std::vector<bool> used(keys.num_groups_);
    std::map<std::string, size_t> place;
    std::vector<std::vector<std::pair<size_t, size_t>>> pairs;
    for (const FlatParameter* flat : flats) {
      pairs.emplace_back();
      for (const auto& original : flat->parameters()) {
        const std::string module =
            options.module_of ? options.module_of(original.name) : "";
        const auto [found, is_new] =
            place.emplace(module, keys.modules_.size());
        if (is_new) keys.modules_.push_back(module);
        size_t g = 0;
        while (g < options.groups.size() &&
               !options.groups[g].matches(original.name,
                                          original.tensor.sizes().vec())) {
          ++g;
        }
        used[g] = true;
        pairs.back().emplace_back(g, found->second);
      }
    }
    for (size_t g = 0; g < options.groups.size(); ++g) {
      if (used[g]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "clip_grad_norms: group '", options.groups[g].name,
          "' matches no trainable parameter that an earlier group left"));
    }
    for (const auto& of_flat : pairs) {
      keys.keys_.emplace_back();
      for (const auto& [group, module] : of_flat) {
        keys.keys_.back().push_back(group * keys.modules_.size() + module);
      }
    }
    return keys;
  }

  // Of the parameters of that flat parameter.
  const std::vector<size_t>& of_flat(size_t flat) const { return keys_[flat]; }
  size_t size() const { return num_groups_ * modules_.size(); }
  size_t group(size_t key) const { return key / modules_.size(); }
  size_t module(size_t key) const { return key % modules_.size(); }
  size_t num_groups() const { return num_groups_; }
  const std::vector<std::string>& modules() const { return modules_; }

 private:
  size_t num_groups_ = 0;
  std::vector<std::string> modules_;
  std::vector<std::vector<size_t>> keys_;
};

absl::StatusOr<GradNorms> measure(const ShardedState& state,
                                  const std::vector<FlatParameter*>& flats,
                                  const NormKeys& keys,
                                  const GradNormOptions& options) {
  const double p = options.p;
  std::vector<PartialNorm> by_key(keys.size());
  for (size_t f = 0; f < flats.size(); ++f) {
    if (!flats[f]->has_gradient()) continue;
    for (const ShardRun& run :
         internal::split_shard(*flats[f], keys.of_flat(f))) {
      by_key[run.key].add(partial_norm(run.of(flats[f]->gradient_shard()), p),
                          p);
    }
  }
  if (p == 1 || p == 2) {
    for (PartialNorm& norm : by_key) norm.scale = 1;
  }
  combine_ranks(state, p, by_key);
  PartialNorm total;
  std::vector<PartialNorm> groups(keys.num_groups());
  std::vector<PartialNorm> modules(keys.modules().size());
  for (size_t key = 0; key < by_key.size(); ++key) {
    total.add(by_key[key], p);
    groups[keys.group(key)].add(by_key[key], p);
    modules[keys.module(key)].add(by_key[key], p);
  }
  const double scale = state.pending_gradient_scale;
  GradNorms norms;
  norms.total = total.value(p) * scale;
  for (const PartialNorm& group : groups) {
    norms.groups.push_back(group.value(p) * scale);
  }
  norms.rest = norms.groups.back();
  norms.groups.pop_back();
  for (size_t m = 0; options.module_of && m < modules.size(); ++m) {
    norms.modules.emplace_back(keys.modules()[m], modules[m].value(p) * scale);
  }
  if (options.error_if_nonfinite && !std::isfinite(norms.total)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "clip_grad_norms: expected a finite gradient norm, got ", norms.total));
  }
  return norms;
}

absl::Status check(const GradNormOptions& options) {
  if (options.p > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "clip_grad_norms: expected p above 0 or infinity, got ", options.p));
}

double coefficient(double max_norm, double norm) {
  if (std::isinf(max_norm)) return 1;
  const double value = max_norm / (norm + 1e-6);
  return value < 1 || std::isnan(value) ? value : 1;
}

void scale_groups(const std::vector<FlatParameter*>& flats,
                  const NormKeys& keys, const std::vector<double>& scales) {
  for (size_t f = 0; f < flats.size(); ++f) {
    if (!flats[f]->has_gradient()) continue;
    for (const ShardRun& run :
         internal::split_shard(*flats[f], keys.of_flat(f))) {
      const double scale = scales[keys.group(run.key)];
      if (scale != 1) run.of(flats[f]->gradient_shard()).mul_(scale);
    }
  }
}

bool all_alike(const std::vector<double>& scales) {
  return std::all_of(scales.begin(), scales.end(),
                     [&](double scale) { return scale == scales[0]; });
}

}  // namespace

ModuleOfParameter module_at_depth(int depth) {
  return [depth](const std::string& name) {
    size_t end = 0;
    for (int part = 0; part < depth; ++part) {
      const size_t dot = name.find('.', part == 0 ? 0 : end + 1);
      if (dot == std::string::npos) break;
      end = dot;
    }
    return name.substr(0, end);
  };
}

absl::StatusOr<GradNorms> grad_norms(const ShardedModule& sharded,
                                     const GradNormOptions& options) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  FS_RETURN_IF_ERROR(check(options));
  const ShardedState& state = *sharded.state();
  const std::vector<FlatParameter*> flats = internal::trainable_flats(state);
  FS_ASSIGN_OR_RETURN(const NormKeys keys, NormKeys::create(flats, options));
  return measure(state, flats, keys, options);
}

absl::StatusOr<GradNorms> clip_grad_norms(const ShardedModule& sharded,
                                          double max_norm,
                                          const GradNormOptions& options) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  FS_RETURN_IF_ERROR(check(options));
  ShardedState& state = *sharded.state();
  const std::vector<FlatParameter*> flats = internal::trainable_flats(state);
  FS_ASSIGN_OR_RETURN(const NormKeys keys, NormKeys::create(flats, options));
  FS_ASSIGN_OR_RETURN(GradNorms norms, measure(state, flats, keys, options));
  std::vector<double> scales;
  for (size_t g = 0; g < options.groups.size(); ++g) {
    scales.push_back(coefficient(options.groups[g].max_norm, norms.groups[g]));
  }
  scales.push_back(coefficient(max_norm, norms.rest));
  if (!all_alike(scales)) {
    scale_groups(flats, keys, scales);
  } else if (scales[0] != 1) {
    state.pending_gradient_scale *= scales[0];
    if (!state.optimizer_applies_scale) state.apply_pending_scale();
  }
  return norms;
}

}  // namespace fullshard
