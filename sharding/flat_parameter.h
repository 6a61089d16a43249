#ifndef FULLSHARD_SHARDING_FLAT_PARAMETER_H_
#define FULLSHARD_SHARDING_FLAT_PARAMETER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "c10/core/Storage.h"
#include "fullshard/core/storage_owner.h"
#include "fullshard/sharding/shard_layout.h"
#include "torch/csrc/autograd/function.h"

namespace fullshard::internal {

// A parameter of the model as it was before sharding.
struct OriginalParameter {
  at::Tensor tensor;
  std::string name;                  // First name in module order.
  std::vector<std::string> aliases;  // Further names of a tied parameter.
  size_t position = 0;               // In module order.
};

// The parameters of one unit that share storage dtype, compute dtype and
// trainability, laid out one after the other and split over the shard group.
// Elements of complex parameters count as two real ones, of which layout,
// shards, gradients and optimizer state consist.
//
// Keeps this rank's master shard and its gradient, and moves the original
// parameters, which keep their identity, between sharded storage and a slot.
// Not thread-safe; its unit's model holds the lock.
class FlatParameter final : public StorageOwner {
 public:
  struct Placement {
    int shard_rank = 0;
    int num_shards = 1;
    c10::Device device = c10::kCPU;
    // Master shards, their gradients and what optimizers keep are in host
    // memory, apart from what the device computes with.
    bool offload = false;
    at::ScalarType compute_dtype = at::kFloat;
    bool trainable = true;
    // Operators that take a parameter have their inputs cast to compute_dtype;
    // to see them all, parameters keep the touch key while unsharded.
    bool cast_inputs = false;
  };

  // Copies this rank's part of `parameters` and takes their memory away.
  // Requires: all tensors have the same dtype.
  static c10::intrusive_ptr<FlatParameter> create(
      std::string unit_name, std::vector<OriginalParameter> parameters,
      const Placement& placement);

  // For create(): shards nothing yet.
  FlatParameter(std::string unit_name,
                std::vector<OriginalParameter> parameters,
                const Placement& placement);

  // Ends the tie to the model: the parameters stay behind without values, and
  // whoever uses one gets an error. Call before the model goes away; the owner
  // and its storages would keep each other alive.
  void detach();
  // Ends it too, but gives the parameters memory of their own in the storage
  // dtype, with the values of `full`, [padded], and returns them.
  std::vector<OriginalParameter> restore(const at::Tensor& full);

  // Makes `sink`'s inputs, from `first_input` on, the gradient edges of the
  // parameters. Call once, for trainable flat parameters.
  void attach_sink(const std::shared_ptr<torch::autograd::Node>& sink,
                   uint32_t first_input);

  // --- paging
  // Copies (casts) the master shard to its place in the gathered memory.
  void write_own_slice(char* gathered) const;
  // Points the parameters at `gathered`, of padded_bytes().
  void page_in(char* gathered);
  // Points the live storage at other memory that holds the same values.
  void relocate(char* gathered);
  // Takes the memory away. Views that are still alive throw when used.
  void page_out();
  // Keeps the memory, but lets the next operator touch the parameters.
  void watch();
  bool has_views() const;
  // Returns what a user did to a parameter that sharding would lose, with the
  // call to use instead, or an empty string. [Note: Guards against misuse]
  std::string misuse();

  // Copies this rank's elements of parameter `index` from `full`, of the
  // parameter's shape and any dtype.
  void load(size_t index, const at::Tensor& full);

  // From now on gathers in the storage dtype, or in the compute dtype again.
  // The layout does not change. Requires: sharded; the transport is made anew.
  void set_full_precision(bool value);

  // --- shared master shard; see [Note: Shared master shards]
  // Moves the master shard to its place in the gathered memory, kept alive by
  // `memory`. Whoever has a view of it sees it move.
  void share_master(char* gathered, const at::Tensor& memory);
  // Moves it back to memory of this rank's own; its shared place stays.
  void own_master();
  // The same, and gives up the shared place.
  void leave_shared_memory();
  // Copies a master shard that was moved back to its shared place.
  void publish_master();
  // Whether the shared place holds its values.
  bool master_is_published() const;

  // --- gradients
  // Adds (or copies) the gradients `inputs[0..size)`, some undefined, to
  // `buffer`, of layout().padded() elements of `dtype`; gaps become zero.
  //
  // With `own`, elements of this rank's own chunk may stay where they are:
  // returns there where each part of the chunk lies, in order and without gaps,
  // in `buffer` or in an input.
  struct Piece {
    int64_t numel = 0;
    const char* data = nullptr;
  };
  void write_gradients(const at::Tensor* inputs, char* buffer,
                       at::ScalarType dtype, bool accumulate,
                       std::vector<Piece>* own = nullptr) const;
  // The gradient shard; allocated on first use. Defined values only if
  // has_gradient().
  const at::Tensor& gradient_shard();
  // Default: the storage dtype. Call before gradient_shard().
  void set_gradient_dtype(at::ScalarType dtype) { gradient_dtype_ = dtype; }
  // Of the memory that it has now.
  int64_t gradient_bytes() const {
    return gradient_.defined() ? static_cast<int64_t>(gradient_.nbytes()) : 0;
  }
  // Forgets the gradient and gives its memory back.
  void free_gradient();
  // A torch::optim optimizer's zero_grad() resets the gradients of the local
  // parameters it was given: of all, then there is none; of some, then those
  // become zero in the shard.
  bool has_gradient();
  void set_has_gradient(bool value);

  // --- local views, for optimizers of torch::optim
  struct LocalParameter {
    size_t index = 0;     // Into parameters().
    at::Tensor tensor;    // 1-D leaf over this rank's elements.
    at::Tensor gradient;  // The same elements of gradient_, once it exists.
  };
  // One per parameter of which this rank owns elements; created on first use,
  // then the same tensors forever. Takes the master shard out of shared memory.
  const std::vector<LocalParameter>& local_parameters();
  // Whether tensors over the master shard were handed to the user, who may
  // write to them at any time and without raising a version counter. The same
  // on all ranks, also where one owns no element.
  bool handed_out() const { return handed_out_; }
  // Hands out the master shard itself.
  const at::Tensor& hand_out_master();

  const std::vector<OriginalParameter>& parameters() const {
    return parameters_;
  }
  const std::vector<std::vector<int64_t>>& strides() const { return strides_; }
  const ShardLayout& layout() const { return layout_; }
  const Placement& placement() const { return placement_; }
  // [chunk], in the storage dtype. Writing to it in place is how optimizers
  // and loads change the model; its version counter is the generation.
  const at::Tensor& master_shard() const { return master_; }
  // Call after an operator that writes without raising the version counter, as
  // LibTorch's fused optimizers do.
  void note_update();
  // Both real.
  at::ScalarType storage_dtype() const { return master_.scalar_type(); }
  // Where the master shard is.
  c10::Device master_device() const { return master_.device(); }
  int64_t padded_bytes() const;
  bool is_complex() const { return element_width_ == 2; }
  // Of the parameters in a state dict.
  at::ScalarType state_dtype() const {
    return is_complex() ? parameter_dtype_ : storage_dtype();
  }
  // Returns parameter `index` as a view of `flat`, a tensor of padded()
  // elements.
  at::Tensor view_of(const at::Tensor& flat, size_t index) const;

  // --- StorageOwner
  void touch() override;
  const c10::Storage& sharded_storage() const override { return sharded_; }
  const c10::Storage& slot_storage() const override { return slot_; }
  uint64_t generation() const override;
  const std::string& name() const override { return unit_name_; }

  // Called by touch(); reset when the model goes away, so that a graph that
  // outlives it gets an error.
  std::function<void()> on_touch;
  // The unit, for the touch of several at once; null once the model is gone.
  class Unit* unit = nullptr;

 private:
  void take_parameters();
  void make_storages();
  bool owns_master() const;
  // Copies a gradient that needs no conversion, but for its own part, which is
  // appended to `own`.
  void copy_gradient(size_t index, const char* from, char* buffer,
                     int64_t element_size, std::vector<Piece>* own) const;
  // Appends what lies in `buffer` between the pieces so far and element `end`.
  static void add_pieces_to(int64_t end, int64_t chunk_begin,
                            const char* buffer, int64_t element_size,
                            std::vector<Piece>& own);
  void replace_parameter(size_t index);
  std::vector<std::pair<int64_t, int64_t>> gaps() const;
  void set_local_gradients();

  // Real elements of a dense tensor of the parameters' dtype, in memory order.
  static at::Tensor real_elements(const at::Tensor& tensor);

  const std::string unit_name_;
  std::vector<OriginalParameter> parameters_;
  Placement placement_;
  const at::ScalarType policy_dtype_;  // Compute dtype without full precision.
  ShardLayout layout_;
  at::ScalarType parameter_dtype_ = at::kFloat;  // While sharded.
  int64_t element_width_ = 1;                    // Real elements in one.
  std::vector<std::vector<int64_t>> strides_;    // In the parameters' elements.

  at::Tensor master_;
  char* shared_place_ = nullptr;  // Of a master shard that is or was shared.
  std::optional<at::ScalarType> gradient_dtype_;
  at::Tensor gradient_;
  bool has_gradient_ = false;
  std::vector<LocalParameter> local_parameters_;
  bool handed_out_ = false;

  c10::Storage sharded_;
  c10::Storage slot_;
  bool paged_in_ = false;
  std::weak_ptr<torch::autograd::Node> sink_;
  uint32_t first_input_ = 0;
  std::vector<int64_t> versions_;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_FLAT_PARAMETER_H_
