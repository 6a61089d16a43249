#include "fullshard/sharding/flat_parameter.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/empty_strided.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/view_as_complex.h"
#include "ATen/ops/view_as_real.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "c10/core/CPUAllocator.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "torch/csrc/autograd/variable.h"

namespace fullshard::internal {
namespace {

namespace ag = torch::autograd;

// Autograd metadata of a trainable sharded parameter. torch's own
// clip_grad_norm_ and other readers of Tensor::grad() find an error in place
// of an undefined gradient that they would skip.
struct ShardedParameterMeta final : ag::AutogradMeta {
  explicit ShardedParameterMeta(std::string name) : name(std::move(name)) {}
  const at::Tensor& grad() const override {
    TORCH_CHECK(false, "parameter '", name,
                "' is sharded and has no gradient of its own; use "
                "FullyShardedModule::clip_grad_norm, named_local_parameters() "
                "or ShardedAdamW");
  }
  const std::string name;
};

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;
       stride *= std::max<int64_t>(sizes[i], 1)) {
    strides[i] = stride;
  }
  return strides;
}

}  // namespace

c10::intrusive_ptr<FlatParameter> FlatParameter::create(
    std::string unit_name, std::vector<OriginalParameter> parameters,
    const Placement& placement) {
  auto flat = c10::make_intrusive<FlatParameter>(
      std::move(unit_name), std::move(parameters), placement);
  // Not in the constructor: the storages hold references to their owner.
  flat->take_parameters();
  return flat;
}

FlatParameter::FlatParameter(std::string unit_name,
                             std::vector<OriginalParameter> parameters,
                             const Placement& placement)
    : unit_name_(std::move(unit_name)),
      parameters_(std::move(parameters)),
      placement_(placement),
      policy_dtype_(placement.compute_dtype) {}

void FlatParameter::detach() {
  page_out();
  on_touch = nullptr;
  unit = nullptr;
  parameters_.clear();
  sharded_ = c10::Storage();
  slot_ = c10::Storage();
}

std::vector<OriginalParameter> FlatParameter::restore(const at::Tensor& full) {
  page_out();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& p = parameters_[i].tensor;
    const at::Tensor values =
        at::empty_strided(
            p.sizes(), strides_[i],
            at::TensorOptions(placement_.device).dtype(state_dtype()))
            .copy_(view_of(full, i));
    set_touch_key(p, false);
    p.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
    p.set_data(values);
  }
  std::vector<OriginalParameter> parameters = std::move(parameters_);
  detach();
  return parameters;
}

at::Tensor FlatParameter::real_elements(const at::Tensor& tensor) {
  const at::Tensor elements =
      tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
  return elements.is_complex() ? at::view_as_real(elements).view({-1})
                               : elements;
}

void FlatParameter::take_parameters() {
  // Whatever mode the caller is in, these must be ordinary tensors. The first
  // guard switches the grad mode on, so the order matters.
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const at::ScalarType dtype = parameters_[0].tensor.scalar_type();
  element_width_ = at::isComplexType(dtype) ? 2 : 1;
  parameter_dtype_ = is_complex() ? dtype : placement_.compute_dtype;
  std::vector<int64_t> numels;
  for (OriginalParameter& original : parameters_) {
    at::Tensor& p = original.tensor;
    const bool dense = p.is_non_overlapping_and_dense();
    strides_.push_back(dense ? p.strides().vec()
                             : contiguous_strides(p.sizes()));
    numels.push_back(p.numel() * element_width_);
  }
  layout_ = ShardLayout::compute(
      std::move(numels),
      static_cast<int64_t>(c10::elementSize(placement_.compute_dtype)),
      placement_.num_shards);
  master_ = at::zeros(
      {layout_.chunk},
      at::TensorOptions(placement_.offload ? c10::Device(c10::kCPU)
                                           : placement_.device)
          .dtype(c10::toRealValueType(dtype))
          .pinned_memory(placement_.offload && !placement_.device.is_cpu()));
  make_storages();
  for (size_t i = 0; i < parameters_.size(); ++i) replace_parameter(i);
}

void FlatParameter::make_storages() {
  sharded_ = make_owned_storage(static_cast<size_t>(padded_bytes()), *this,
                                placement_.device);
  make_throwing(sharded_,
                absl::StrCat("unit '", unit_name_,
                             "' is sharded: its parameters can be read by "
                             "operators, not through their data pointer; use "
                             "full_state_dict() to read or save them"));
  slot_ = make_owned_storage(static_cast<size_t>(padded_bytes()), *this,
                             placement_.device);
}

void FlatParameter::set_full_precision(bool value) {
  placement_.compute_dtype = value ? storage_dtype() : policy_dtype_;
  if (!is_complex()) parameter_dtype_ = placement_.compute_dtype;
  make_storages();
  for (const OriginalParameter& original : parameters_) {
    original.tensor.unsafeGetTensorImpl()->set_storage_and_dtype(
        sharded_, c10::scalarTypeToTypeMeta(parameter_dtype_));
  }
}

void FlatParameter::replace_parameter(size_t index) {
  at::Tensor& p = parameters_[index].tensor;
  load(index, p.detach());
  at::Tensor view = at::empty(
      {0}, at::TensorOptions(placement_.device).dtype(parameter_dtype_));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      p.sizes(), strides_[index], layout_.offsets[index] / element_width_);
  view.unsafeGetTensorImpl()->set_storage_keep_dtype(sharded_);
  p.set_requires_grad(false);
  p.set_data(view);
  if (placement_.trainable) {
    p.unsafeGetTensorImpl()->set_autograd_meta(
        std::make_unique<ShardedParameterMeta>(parameters_[index].name));
  }
  set_touch_key(p, true);
  versions_.push_back(p._version());
}

void FlatParameter::load(size_t index, const at::Tensor& full) {
  const ShardLayout::Range range =
      layout_.local_range(index, placement_.shard_rank);
  if (range.numel == 0) return;
  at::Tensor source = full;
  if (source.strides() != strides_[index]) {
    source = at::empty_strided(full.sizes(), strides_[index], full.options())
                 .copy_(full);
  }
  master_.narrow(0, range.shard_offset, range.numel)
      .copy_(
          real_elements(source).narrow(0, range.parameter_offset, range.numel));
}

void FlatParameter::attach_sink(const std::shared_ptr<ag::Node>& sink,
                                uint32_t first_input) {
  sink_ = sink;
  first_input_ = first_input;
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& p = parameters_[i].tensor;
    sink->add_input_metadata(p);
    ag::impl::set_gradient_edge(p, ag::Edge(sink, first_input + i));
  }
}

int64_t FlatParameter::padded_bytes() const {
  return layout_.padded() *
         static_cast<int64_t>(c10::elementSize(placement_.compute_dtype));
}

void FlatParameter::write_own_slice(char* gathered) const {
  const int64_t chunk_bytes = padded_bytes() / placement_.num_shards;
  char* own = gathered + chunk_bytes * placement_.shard_rank;
  if (placement_.device.is_cpu() &&
      storage_dtype() == placement_.compute_dtype) {
    std::memcpy(own, master_.const_data_ptr(),
                static_cast<size_t>(chunk_bytes));
    return;
  }
  at::NoGradGuard no_grad;
  at::from_blob(
      own, {layout_.chunk},
      at::TensorOptions(placement_.device).dtype(placement_.compute_dtype))
      .copy_(master_);
}

void FlatParameter::share_master(char* gathered, const at::Tensor& memory) {
  shared_place_ =
      gathered + padded_bytes() / placement_.num_shards * placement_.shard_rank;
  std::memcpy(shared_place_, master_.const_data_ptr(), master_.nbytes());
  c10::StorageImpl* storage =
      master_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(
      shared_place_, new at::Tensor(memory),
      [](void* kept) { delete static_cast<at::Tensor*>(kept); },
      placement_.device));
}

void FlatParameter::own_master() {
  if (shared_place_ == nullptr || shared_place_ != master_.const_data_ptr())
    return;
  c10::DataPtr own = c10::GetCPUAllocator()->allocate(master_.nbytes());
  std::memcpy(own.get(), shared_place_, master_.nbytes());
  master_.unsafeGetTensorImpl()
      ->unsafe_storage()
      .unsafeGetStorageImpl()
      ->set_data_ptr_noswap(std::move(own));
}

void FlatParameter::leave_shared_memory() {
  own_master();
  shared_place_ = nullptr;
}

bool FlatParameter::owns_master() const {
  return shared_place_ != nullptr && shared_place_ != master_.const_data_ptr();
}

bool FlatParameter::master_is_published() const {
  return !owns_master() || std::memcmp(shared_place_, master_.const_data_ptr(),
                                       master_.nbytes()) == 0;
}

void FlatParameter::publish_master() {
  if (!owns_master()) return;
  std::memcpy(shared_place_, master_.const_data_ptr(), master_.nbytes());
}

void FlatParameter::page_in(char* gathered) {
  slot_.unsafeGetStorageImpl()->set_data_ptr_noswap(
      owned_data_ptr(gathered, *this, placement_.device));
  for (const OriginalParameter& original : parameters_) {
    const at::Tensor& p = original.tensor;
    p.unsafeGetTensorImpl()->set_storage_keep_dtype(slot_);
    set_touch_key(p, placement_.cast_inputs);
  }
  paged_in_ = true;
}

void FlatParameter::relocate(char* gathered) {
  slot_.unsafeGetStorageImpl()->set_data_ptr_noswap(
      owned_data_ptr(gathered, *this, placement_.device));
}

bool FlatParameter::has_views() const {
  // Each parameter and slot_ itself count once. Whatever is left is a view in
  // a local variable or an unpacked tensor of the node that is running.
  return paged_in_ && slot_.use_count() > parameters_.size() + 1;
}

void FlatParameter::page_out() {
  if (!paged_in_) return;
  const bool views = has_views();
  paged_in_ = false;
  for (const OriginalParameter& original : parameters_) {
    const at::Tensor& p = original.tensor;
    p.unsafeGetTensorImpl()->set_storage_keep_dtype(sharded_);
    set_touch_key(p, true);
  }
  if (views) {
    make_throwing(slot_,
                  absl::StrCat("a view of a parameter of unit '", unit_name_,
                               "' is used after the unit was "
                               "resharded; clone what must outlive it"));
    slot_ = make_owned_storage(static_cast<size_t>(padded_bytes()), *this,
                               placement_.device);
  } else {
    slot_.unsafeGetStorageImpl()->set_data_ptr_noswap(
        owned_data_ptr(nullptr, *this, placement_.device));
  }
}

void FlatParameter::watch() {
  for (const OriginalParameter& original : parameters_) {
    set_touch_key(original.tensor, true);
  }
}

// [Note: Guards against misuse]
// LibTorch lets a user write to a sharded parameter, give it other storage or
// change its autograd edge without a word, and the change would be lost at the
// next reshard. Each leaves a sign that costs a few loads to look for.
std::string FlatParameter::misuse() {
  const c10::StorageImpl* expected =
      (paged_in_ ? slot_ : sharded_).unsafeGetStorageImpl();
  const std::shared_ptr<ag::Node> sink = sink_.lock();
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& p = parameters_[i].tensor;
    const std::string& name = parameters_[i].name;
    const c10::TensorImpl* impl = p.unsafeGetTensorImpl();
    if (impl->unsafe_storage().unsafeGetStorageImpl() != expected ||
        p.scalar_type() != parameter_dtype_) {
      return absl::StrCat(
          "parameter '", name,
          "' was given other storage or another dtype after sharding "
          "(Module::to, set_data); convert the model before fully_shard, or "
          "use ShardOptions::mixed_precision");
    }
    if (p._version() != versions_[i]) {
      versions_[i] = p._version();
      return absl::StrCat("parameter '", name,
                          "' was written in place after sharding, and the "
                          "change would be lost; initialise before "
                          "fully_shard, or use load_full_state_dict");
    }
    if (placement_.trainable && sink && p.grad_fn() != sink) {
      ag::impl::set_gradient_edge(p, ag::Edge(sink, first_input_ + i));
      return absl::StrCat("parameter '", name,
                          "' was modified in place under autograd");
    }
    if (!placement_.trainable && p.requires_grad()) {
      return absl::StrCat("frozen parameter '", name,
                          "' was set to require gradients after sharding; use "
                          "set_trainable of the sharded module");
    }
  }
  return "";
}

std::vector<std::pair<int64_t, int64_t>> FlatParameter::gaps() const {
  std::vector<std::pair<int64_t, int64_t>> gaps;
  int64_t end = 0;
  for (size_t i = 0; i < layout_.offsets.size(); ++i) {
    if (layout_.offsets[i] > end) gaps.emplace_back(end, layout_.offsets[i]);
    end = layout_.offsets[i] + layout_.numels[i];
  }
  if (layout_.padded() > end) gaps.emplace_back(end, layout_.padded());
  return gaps;
}

void FlatParameter::copy_gradient(size_t index, const char* from, char* buffer,
                                  int64_t element_size,
                                  std::vector<Piece>* own) const {
  const int64_t begin = layout_.offsets[index];
  const int64_t end = begin + layout_.numels[index];
  const auto copy = [&](int64_t first, int64_t last) {
    if (first >= last) return;
    std::memcpy(buffer + first * element_size,
                from + (first - begin) * element_size,
                static_cast<size_t>((last - first) * element_size));
  };
  if (own == nullptr) return copy(begin, end);
  const ShardLayout::Range range =
      layout_.local_range(index, placement_.shard_rank);
  if (range.numel == 0) return copy(begin, end);
  const int64_t own_begin = begin + range.parameter_offset;
  copy(begin, own_begin);
  copy(own_begin + range.numel, end);
  const int64_t chunk_begin = layout_.chunk * placement_.shard_rank;
  add_pieces_to(own_begin, chunk_begin, buffer, element_size, *own);
  own->push_back({range.numel, from + range.parameter_offset * element_size});
}

void FlatParameter::add_pieces_to(int64_t end, int64_t chunk_begin,
                                  const char* buffer, int64_t element_size,
                                  std::vector<Piece>& own) {
  int64_t at = chunk_begin;
  for (const Piece& piece : own) at += piece.numel;
  if (at < end) own.push_back({end - at, buffer + at * element_size});
}

void FlatParameter::write_gradients(const at::Tensor* inputs, char* buffer,
                                    at::ScalarType dtype, bool accumulate,
                                    std::vector<Piece>* own) const {
  const int64_t element_size = static_cast<int64_t>(c10::elementSize(dtype));
  const at::TensorOptions options =
      at::TensorOptions(placement_.device).dtype(dtype);
  const bool host = placement_.device.is_cpu();
  auto zero = [&](int64_t begin, int64_t end) {
    char* at = buffer + begin * element_size;
    if (host) {
      std::memset(at, 0, static_cast<size_t>((end - begin) * element_size));
    } else {
      at::from_blob(at, {end - begin}, options).zero_();
    }
  };
  if (!accumulate) {
    for (const auto& [begin, end] : gaps()) zero(begin, end);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t begin = layout_.offsets[i];
    const at::Tensor& g = inputs[i];
    if (!g.defined()) {
      if (!accumulate) zero(begin, begin + layout_.numels[i]);
      continue;
    }
    char* at = buffer + begin * element_size;
    if (!accumulate && host && c10::toRealValueType(g.scalar_type()) == dtype &&
        g.layout() == at::kStrided && g.strides() == strides_[i]) {
      copy_gradient(i, static_cast<const char*>(g.const_data_ptr()), buffer,
                    element_size, own);
      continue;
    }
    const at::Tensor dense = g.is_sparse() ? g.to_dense() : g;
    const at::Tensor elements = at::from_blob(at, {layout_.numels[i]}, options);
    at::Tensor target =
        (is_complex()
             ? at::view_as_complex(elements.view({elements.numel() / 2, 2}))
             : elements)
            .as_strided(dense.sizes(), strides_[i]);
    if (accumulate) {
      target.add_(dense);
    } else {
      target.copy_(dense);
    }
  }
  if (own != nullptr) {
    const int64_t chunk_begin = layout_.chunk * placement_.shard_rank;
    add_pieces_to(chunk_begin + layout_.chunk, chunk_begin, buffer,
                  element_size, *own);
  }
}

const at::Tensor& FlatParameter::gradient_shard() {
  if (!gradient_.defined()) {
    c10::InferenceMode ordinary_tensors(false);
    at::NoGradGuard no_grad;
    gradient_ = at::zeros(
        {layout_.chunk},
        master_.options().dtype(gradient_dtype_.value_or(storage_dtype())));
  }
  return gradient_;
}

void FlatParameter::free_gradient() {
  set_has_gradient(false);
  for (LocalParameter& local : local_parameters_) local.gradient = at::Tensor();
  gradient_ = at::Tensor();
}

bool FlatParameter::has_gradient() {
  if (!has_gradient_ || local_parameters_.empty()) return has_gradient_;
  const auto was_reset = [](const LocalParameter& local) {
    return !local.tensor.grad().defined();
  };
  const auto begin = local_parameters_.begin(), end = local_parameters_.end();
  const auto first = std::find_if(begin, end, was_reset);
  if (first == end) return true;
  if (std::all_of(begin, end, was_reset)) return false;
  at::NoGradGuard no_grad;
  for (auto local = first; local != end; ++local) {
    if (was_reset(*local)) local->gradient.zero_();
  }
  return true;
}

void FlatParameter::set_has_gradient(bool value) {
  has_gradient_ = value;
  set_local_gradients();
}

void FlatParameter::set_local_gradients() {
  for (LocalParameter& local : local_parameters_) {
    if (has_gradient_ && !local.gradient.defined()) {
      const ShardLayout::Range range =
          layout_.local_range(local.index, placement_.shard_rank);
      // Not a view for autograd: zero_grad() of torch::optim detaches it.
      local.gradient = gradient_shard()
                           .narrow(0, range.shard_offset, range.numel)
                           .tensor_data();
    }
    local.tensor.mutable_grad() = has_gradient_ ? local.gradient : at::Tensor();
  }
}

const std::vector<FlatParameter::LocalParameter>&
FlatParameter::local_parameters() {
  hand_out_master();
  if (local_parameters_.empty() && placement_.trainable) {
    c10::InferenceMode ordinary_tensors(false);
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const ShardLayout::Range range =
          layout_.local_range(i, placement_.shard_rank);
      if (range.numel == 0) continue;
      LocalParameter local;
      local.index = i;
      // detach() shares the version counter with the master shard.
      local.tensor =
          master_.narrow(0, range.shard_offset, range.numel).detach();
      local.tensor.set_requires_grad(true);
      local_parameters_.push_back(std::move(local));
    }
    set_local_gradients();
  }
  return local_parameters_;
}

const at::Tensor& FlatParameter::hand_out_master() {
  handed_out_ = true;
  own_master();
  return master_;
}

at::Tensor FlatParameter::view_of(const at::Tensor& flat, size_t index) const {
  const at::Tensor elements =
      is_complex() ? at::view_as_complex(flat.view({flat.numel() / 2, 2}))
                   : flat;
  return elements.as_strided(parameters_[index].tensor.sizes(), strides_[index],
                             layout_.offsets[index] / element_width_);
}

void FlatParameter::touch() {
  TORCH_CHECK(on_touch, "unit '", unit_name_,
              "' is gone: its FullyShardedModule was destroyed");
  on_touch();
}

void FlatParameter::note_update() {
  master_.unsafeGetTensorImpl()->bump_version();
}

uint64_t FlatParameter::generation() const {
  return static_cast<uint64_t>(master_._version());
}

}  // namespace fullshard::internal
