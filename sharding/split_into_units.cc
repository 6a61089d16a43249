#include "fullshard/sharding/split_into_units.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "ATen/ops/empty_strided.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "fullshard/core/logging.h"
#include "fullshard/core/status.h"
#include "fullshard/core/storage_owner.h"
#include "fullshard/sharding/group_parameters.h"
#include "torch/nn/modules/container/moduledict.h"
#include "torch/nn/modules/container/modulelist.h"

namespace fullshard::internal {
namespace {

struct Claim {
  OriginalParameter parameter;
  Unit* unit = nullptr;
  bool full_precision = false;
  size_t module = 0;  // Into Splitter::modules_: who owns it.
};

std::string join_path(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

Unit* lowest_common(Unit* a, Unit* b) {
  std::set<Unit*> above;
  for (Unit* u = a; u != nullptr; u = u->parent) above.insert(u);
  while (above.count(b) == 0) b = b->parent;
  return b;
}

class Splitter {
 public:
  Splitter(const ProcessGroups& groups, const ShardOptions& options)
      : groups_(groups), options_(options) {}

  // Finds the modules that the wrap policy takes by their size. Returns how
  // many elements of `module` no unit below or at it has taken.
  int64_t choose_by_size(torch::nn::Module& module, const std::string& path) {
    int64_t numel = 0;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (item.value().defined()) numel += item.value().numel();
    }
    for (const auto& child : module.named_children()) {
      numel += choose_by_size(*child.value(), join_path(path, child.key()));
    }
    if (options_.wrap_policy.matches(path, module)) return 0;
    const bool container =
        dynamic_cast<torch::nn::ModuleListImpl*>(&module) != nullptr ||
        dynamic_cast<torch::nn::ModuleDictImpl*>(&module) != nullptr;
    if (container || numel < options_.wrap_policy.min_numel()) return numel;
    large_.insert(&module);
    return 0;
  }

  void visit(torch::nn::Module& module, const std::string& path, Unit* unit) {
    types_.insert(type_name(typeid(module)));
    modules_.push_back({path, &module});
    if (unit == nullptr || options_.wrap_policy.matches(path, module) ||
        large_.count(&module) != 0) {
      unit = add_unit(path, module, unit);
    }
    const bool full_precision =
        options_.mixed_precision.keep_full_precision &&
        options_.mixed_precision.keep_full_precision(module);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!item.value().defined()) continue;
      const std::string name = join_path(path, item.key());
      if (options_.ignored && options_.ignored(name)) continue;
      claim(item.value(), name, unit, full_precision, modules_.size() - 1);
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), join_path(path, child.key()), unit);
    }
  }

  absl::StatusOr<std::vector<std::unique_ptr<Unit>>> shard() {
    if (!options_.wrap_policy.empty() && units_.size() == 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("wrap_policy (", options_.wrap_policy.description(),
                       ") matches no module; the model has modules of types ",
                       absl::StrJoin(types_, ", ")));
    }
    if (claims_.empty()) {
      return absl::InvalidArgumentError("the module has no parameters");
    }
    FS_RETURN_IF_ERROR(check_unit_options());
    for (const auto& unit : units_) {
      FS_RETURN_IF_ERROR(shard_unit(*unit));
    }
    for (OwningModule& module : modules_) {
      FS_RETURN_IF_ERROR(materialize(module));  // Buffers, ignored parameters.
    }
    drop_empty_units();
    choose_reduce_dtypes();
    return std::move(units_);
  }

 private:
  struct OwningModule {
    std::string path;
    torch::nn::Module* module;
  };

  Unit* add_unit(const std::string& path, const torch::nn::Module& module,
                 Unit* parent) {
    auto unit = std::make_unique<Unit>();
    unit->name = path.empty() ? "root" : path;
    unit->parent = parent;
    UnitOptions& own = unit_options_[unit.get()];
    own.param_dtype = options_.mixed_precision.param_dtype;
    own.reduce_dtype = options_.mixed_precision.reduce_dtype;
    own.cast_forward_inputs = options_.mixed_precision.cast_forward_inputs;
    own.reshard_after_forward =
        options_.strategy == ShardingStrategy::kFullShard ||
        options_.strategy == ShardingStrategy::kHybridShard;
    if (options_.unit_options) {
      options_.unit_options(unit->name, module, own);
    }
    unit->reshard_after_forward = own.reshard_after_forward;
    units_.push_back(std::move(unit));
    return units_.back().get();
  }

  absl::Status check_unit_options() const {
    for (const auto& [unit, own] : unit_options_) {
      MixedPrecision policy;
      policy.param_dtype = own.param_dtype;
      policy.reduce_dtype = own.reduce_dtype;
      const absl::Status status = validate(policy);
      if (status.ok()) continue;
      return absl::Status(status.code(), absl::StrCat("unit '", unit->name,
                                                      "': ", status.message()));
    }
    return absl::OkStatus();
  }

  bool units_differ_in_dtype() const {
    return std::any_of(unit_options_.begin(), unit_options_.end(),
                       [&](const auto& entry) {
                         return entry.second.param_dtype !=
                                unit_options_.begin()->second.param_dtype;
                       });
  }

  // Without a reduce_dtype: param_dtype; without that too what all trainable
  // parameters share, and float if they differ.
  void choose_reduce_dtypes() {
    std::optional<at::ScalarType> common;
    for (const auto& unit : units_) {
      for (const auto& flat : unit->flats) {
        if (!flat->placement().trainable) continue;
        const at::ScalarType dtype = flat->storage_dtype();
        if (!common.has_value()) common = dtype;
        if (*common == dtype || *common == at::kDouble) continue;
        common = dtype == at::kDouble ? at::kDouble : at::kFloat;
      }
    }
    for (const auto& unit : units_) {
      const UnitOptions& own = unit_options_.at(unit.get());
      unit->reduce_dtype = own.reduce_dtype.has_value() ? *own.reduce_dtype
                           : own.param_dtype.has_value()
                               ? *own.param_dtype
                               : common.value_or(at::kFloat);
    }
  }

  void claim(const at::Tensor& tensor, std::string name, Unit* unit,
             bool full_precision, size_t module) {
    const auto [found, inserted] =
        by_tensor_.emplace(tensor.unsafeGetTensorImpl(), claims_.size());
    if (inserted) {
      claims_.push_back({{tensor, std::move(name), {}, claims_.size()},
                         unit,
                         full_precision,
                         module});
      return;
    }
    Claim& first = claims_[found->second];
    if (first.parameter.name == name) return;
    Unit* common = lowest_common(first.unit, unit);
    if (common != first.unit) {
      log_info(absl::StrCat(
          "parameter '", first.parameter.name, "' is tied to '", name,
          "' of another unit: both move to unit '", common->name, "'"));
      first.unit = common;
    }
    first.parameter.aliases.push_back(std::move(name));
  }

  absl::Status shard_unit(Unit& unit) {
    std::vector<PlacedParameter> parameters;
    for (Claim& claim : claims_) {
      if (claim.unit != &unit) continue;
      FS_RETURN_IF_ERROR(materialize(modules_[claim.module]));
      FS_RETURN_IF_ERROR(prepare(claim.parameter));
      const at::ScalarType dtype = claim.parameter.tensor.scalar_type();
      parameters.push_back(
          {std::move(claim.parameter),
           claim.full_precision
               ? c10::toRealValueType(dtype)
               : c10::toRealValueType(compute_dtype(
                     dtype, unit_options_.at(&unit).param_dtype))});
    }
    const bool sharded = options_.strategy != ShardingStrategy::kNoShard;
    FlatParameter::Placement placement;
    placement.shard_rank = sharded ? groups_.shard_group()->getRank() : 0;
    placement.num_shards = sharded ? groups_.shard_group()->getSize() : 1;
    placement.device = groups_.device();
    placement.offload = options_.offload;
    placement.cast_inputs =
        units_differ_in_dtype() && unit_options_.at(&unit).cast_forward_inputs;
    unit.flats = group_parameters(unit.name, std::move(parameters), placement);
    return absl::OkStatus();
  }

  // Gives a module's meta tensors memory and values.
  absl::Status materialize(const OwningModule& owner) {
    std::vector<std::pair<std::string, at::Tensor>> meta;
    const auto collect = [&](const auto& items) {
      for (const auto& item : items) {
        if (item.value().defined() && item.value().is_meta()) {
          meta.emplace_back(item.key(), item.value());
        }
      }
    };
    collect(owner.module->named_parameters(/*recurse=*/false));
    collect(owner.module->named_buffers(/*recurse=*/false));
    if (meta.empty()) return absl::OkStatus();
    if (!options_.materialize) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", join_path(owner.path, meta[0].first),
                       "' is on the meta device; set "
                       "ShardOptions::materialize to initialise it"));
    }
    at::NoGradGuard no_grad;
    for (auto& [name, tensor] : meta) {
      const at::Tensor memory = at::empty_strided(
          tensor.sizes(), tensor.strides(),
          tensor.options().device(groups_.device()).requires_grad(false));
      // set_data() refuses another kind of device.
      c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      impl->_change_backend_component_keys(groups_.device());
      impl->set_storage_keep_dtype(memory.storage());
    }
    options_.materialize(owner.path, *owner.module);
    return absl::OkStatus();
  }

  absl::Status prepare(OriginalParameter& parameter) {
    at::Tensor& p = parameter.tensor;
    if (storage_owner(p) != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter '", parameter.name, "' is sharded already"));
    }
    if (p.requires_grad() && !p.is_leaf()) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter '", parameter.name, "' is not a leaf"));
    }
    at::NoGradGuard no_grad;
    if (p.device() != groups_.device()) p.set_data(p.to(groups_.device()));
    if (options_.sync_module_states && groups_.world_size() > 1) {
      at::Tensor values = p.detach().contiguous();
      std::vector<at::Tensor> tensors = {values};
      groups_.world()->broadcast(tensors)->wait();
      if (!values.is_same(p)) p.detach().copy_(values);
    }
    return absl::OkStatus();
  }

  void drop_empty_units() {
    for (const auto& unit : units_) {
      while (unit->parent != nullptr && unit->parent->flats.empty()) {
        unit->parent = unit->parent->parent;
      }
    }
    units_.erase(
        std::remove_if(units_.begin(), units_.end(),
                       [](const auto& unit) { return unit->flats.empty(); }),
        units_.end());
    for (size_t i = 0; i < units_.size(); ++i) {
      units_[i]->index = static_cast<int>(i);
      if (units_[i]->parent != nullptr) units_[i]->parent->has_children = true;
    }
  }

  const ProcessGroups& groups_;
  const ShardOptions& options_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unordered_map<const Unit*, UnitOptions> unit_options_;
  std::vector<OwningModule> modules_;
  std::vector<Claim> claims_;
  std::unordered_map<c10::TensorImpl*, size_t> by_tensor_;
  std::set<torch::nn::Module*> large_;
  std::set<std::string> types_;
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Unit>>> split_into_units(
    torch::nn::Module& root, const ProcessGroups& groups,
    const ShardOptions& options) {
  Splitter splitter(groups, options);
  if (options.wrap_policy.min_numel() > 0) splitter.choose_by_size(root, "");
  splitter.visit(root, "", nullptr);
  return splitter.shard();
}

}  // namespace fullshard::internal
