#ifndef FULLSHARD_SHARDING_FULLY_SHARD_H_
#define FULLSHARD_SHARDING_FULLY_SHARD_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/sharding/plan.h"
#include "fullshard/sharding/shard_options.h"
#include "torch/nn/module.h"

namespace fullshard {

namespace internal {
class ShardedState;
class Unit;
class WholeTensors;
}  // namespace internal

// Receives one tensor of a state dict. The tensor is valid during the call.
using TensorSink =
    std::function<absl::Status(const std::string& name, const at::Tensor&)>;
// Returns the whole tensor of that name; kNotFound if there is none.
using TensorSource =
    std::function<absl::StatusOr<at::Tensor>(const std::string& name)>;

struct LoadOptions {
  // Selects what to load; default: everything.
  std::function<bool(const std::string& name)> names;
  // Convert tensors of another dtype in place of refusing them.
  bool cast_dtypes = false;
  // Only rank 0 asks its source, and sends each tensor to the others.
  bool from_rank0 = false;
  // Copies elements [begin, begin + out.numel()) of what `source` returned,
  // counted in its order in memory, to `out`, 1-D, in its dtype. Default: from
  // memory. `read_elements` of io/ reads files without mapping them. Not with
  // from_rank0.
  std::function<absl::Status(const at::Tensor& tensor,
                             const std::vector<int64_t>& order, int64_t begin,
                             at::Tensor out)>
      read;
  // Hears what `read` will be called with, some calls before, so that a disk
  // never waits for the next call. `read_elements_ahead` of io/ is one.
  std::function<void(const at::Tensor& tensor,
                     const std::vector<int64_t>& order, int64_t begin,
                     int64_t numel)>
      read_ahead;
};

// This rank's elements of one parameter, in memory order.
struct LocalParameter {
  std::string name;  // As in the original module.
  // 1-D leaf; its .grad is the gradient shard. Of a complex parameter: real and
  // imaginary parts in turn, as torch::view_as_real has them.
  at::Tensor tensor;
  std::vector<int64_t> original_sizes;
};

// This rank's elements of one parameter, trainable or frozen, for checkpoints.
struct LocalShard {
  std::string name;                  // As in the original module.
  std::vector<std::string> aliases;  // Further names of a tied parameter.
  std::vector<int64_t> sizes;        // Of the whole parameter.
  std::vector<int64_t> order;        // See core/memory_order.h.
  int64_t begin = 0;                 // First element, in memory order.
  at::Tensor values;                 // 1-D view of the master shard.
  // Several ranks may have the same elements; this one is to save and load
  // them.
  bool own_turn = true;
};

struct SummonOptions {
  // Edits in place become the parameters' values: on each rank its own part, so
  // every rank must make the same ones. Excludes rank0_only, with which other
  // ranks would not see the edit.
  bool writeback = true;
  bool rank0_only = false;
  bool offload_to_cpu = false;
  bool with_gradients = false;
};

struct FullParameter {
  std::string name;
  at::Tensor value;
  at::Tensor gradient;  // Undefined unless asked for and there is one.
};

// Bytes that this rank has allocated for sharding, now. What the ranks of a
// host share is counted on rank 0.
struct MemoryUse {
  int64_t masters = 0;         // Master shards.
  int64_t gradients = 0;       // Gradient shards.
  int64_t slots = 0;           // For unsharded units.
  int64_t reduce_buffers = 0;  // For gradients on their way.
  int64_t kept_gradients = 0;  // Unsharded, under no_sync.

  int64_t total() const {
    return masters + gradients + slots + reduce_buffers + kept_gradients;
  }
};

// One row of an inspection of the units.
struct UnitInfo {
  std::string name;
  std::vector<std::string> parameters;
  int64_t numel = 0;  // Of the original parameters.
  int64_t padding_numel = 0;
  int64_t unsharded_bytes = 0;  // In the compute dtype.
  int64_t sharded_bytes = 0;    // This rank's master shards.
  bool trainable = false;
  bool unsharded = false;  // Now.
};

// A module whose parameters are split over the ranks, without its type. A cheap
// handle: copies share the state. The module keeps working through any of its
// methods; see docs/a_step.md.
class ShardedModule {
 public:
  // --- gradients
  // Clips the gradient of the whole model to `max_norm` by its p-norm (p may
  // be infinity): scales by max_norm / (norm + 1e-6) if that is below 1.
  // Returns the norm before clipping, the same on every rank.
  //
  // Collective. With a ShardedAdamW attached the scaling happens inside its
  // next step().
  // Errors: c10::Error if a peer fails.
  double clip_grad_norm(double max_norm, double p = 2);
  // Forgets all gradients. The memory of gradient shards stays for the next
  // backward, so that steps allocate nothing; with `set_to_none` it is freed,
  // and a rank has its master shards and the optimizer's state.
  void zero_grad(bool set_to_none = false);

  // While off, backward keeps unsharded gradients in the reduce dtype and does
  // not communicate; the next backward with it on reduces their sum.
  void set_requires_gradient_sync(bool value);

  // Turns gradient synchronisation off while alive.
  class NoSync {
   public:
    explicit NoSync(std::shared_ptr<internal::ShardedState> state);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<internal::ShardedState> state_;
    const bool before_;
  };
  NoSync no_sync() const { return NoSync(state_); }

  // Off: backward reduces over the shard group only, and keeps the sums back
  // until a backward with it on takes them through the replicas' all-reduce.
  // For all but the last micro-batch under hybrid sharding.
  void set_requires_all_reduce(bool value);

  // --- uneven inputs
  // While alive, ranks may run out of batches at different times. A rank that
  // has none left calls finish(), which takes part in the others' steps, with
  // gradients of zero, until all have; so all ranks must call it. After each of
  // those steps that ends with gradients it calls `step`, which must do what
  // the training loop does after backward (clip, optimizer, zero_grad,
  // schedule). Gradients are divided by all ranks as before. Each forward
  // starts with one small all-reduce, and has one backward.
  //
  // Example:
  //   auto join = sharded.join();
  //   for (auto& batch : batches) { loss(batch).backward(); step(); }
  //   join.finish(step);
  class Join {
   public:
    explicit Join(std::shared_ptr<internal::ShardedState> state);
    ~Join();
    Join(const Join&) = delete;
    Join& operator=(const Join&) = delete;

    // Collective. Errors: c10::Error on a rank that has run fewer than two
    // steps, unless gathers do not communicate (fp32 on one host).
    void finish(const std::function<void()>& step);

   private:
    std::shared_ptr<internal::ShardedState> state_;
  };
  Join join() const { return Join(state_); }

  // --- parameters
  // This rank's elements of the trainable parameters, in module order; for any
  // optimizer of torch::optim. The same tensors at every call.
  std::vector<LocalParameter> named_local_parameters() const;
  // The flat master shards of the trainable parameters.
  std::vector<at::Tensor> parameters() const;

  // Makes the parameters for which `which` holds trainable, or freezes them.
  // Values do not change, nor the optimizer's state of other parameters; one
  // that is frozen loses its own. Local parameters of the units concerned are
  // to be asked for again.
  //
  // Collective. Call between steps.
  // Errors: kInvalidArgument for a parameter that is not floating,
  // kFailedPrecondition naming a unit that has a gradient.
  absl::Status set_trainable(
      const std::function<bool(const std::string& name)>& which, bool value);

  // --- unsharding by hand
  // A gather that was started. The first use of the unit waits for it too.
  class UnshardHandle {
   public:
    UnshardHandle(std::shared_ptr<internal::ShardedState> state,
                  std::vector<internal::Unit*> units);
    // Returns when the parameters can be read without waiting.
    void wait();

   private:
    std::shared_ptr<internal::ShardedState> state_;
    std::vector<internal::Unit*> units_;
  };
  // Starts to gather these units (as UnitInfo::name; none: all). They stay
  // unsharded until the end of the next backward, or forward without gradients,
  // until reshard() or an optimizer step.
  //
  // Collective. Errors: kNotFound naming the unit.
  absl::StatusOr<UnshardHandle> unshard(
      const std::vector<std::string>& units = {}) const;
  // Makes every unit give up its unsharded memory; local parameters may be
  // changed afterwards. Collective.
  void reshard();
  // The same for these units. Errors: kNotFound naming the unit.
  absl::Status reshard(const std::vector<std::string>& units);

  // Whether units give up their unsharded memory when forward has gone on to
  // the next; `units`: all if empty. Applies from the next forward on, which
  // records the order of gathers anew. Units that started with the other value
  // may need memory of their own. Collective.
  absl::Status set_reshard_after_forward(
      bool value, const std::vector<std::string>& units = {});
  // Off: units stay unsharded after backward until an optimizer step, so that
  // further micro-batches gather nothing.
  void set_reshard_after_backward(bool value);
  // Whenever `unit` is gathered in forward (backward), starts the gathers of
  // `next` too. Collective. Errors: kNotFound naming the unit.
  absl::Status set_forward_prefetch(const std::string& unit,
                                    const std::vector<std::string>& next);
  absl::Status set_backward_prefetch(const std::string& unit,
                                     const std::vector<std::string>& next);

  // Calls `body` with every parameter in full, in its storage dtype and
  // original shape.
  //
  // Collective; on ranks that are left out `body` gets an empty list.
  // Errors: kInvalidArgument for options that exclude each other; an error of
  // `body` is returned, and nothing written back on that rank.
  absl::Status summon_full_params(
      const SummonOptions& options,
      const std::function<absl::Status(std::vector<FullParameter>&)>& body);

  // --- state
  // Names of parameters and buffers in state-dict order.
  std::vector<std::string> state_dict_names() const;

  // Gathers unit by unit and calls `sink` with every parameter and buffer, in
  // the storage dtype and original shape: on rank 0, or with `all_ranks` on
  // every rank. Tensors come grouped by unit, buffers last.
  //
  // `finish`, if given, runs where `sink` ran, after the last tensor, if all
  // went well.
  //
  // Collective: returns on every rank when all are done. Errors: the first one
  // of `sink` or `finish`; kAborted on ranks that had none themselves.
  absl::Status full_state_dict(
      const TensorSink& sink, bool all_ranks = false,
      const std::function<absl::Status()>& finish = nullptr) const;

  // Copies this rank's part of every parameter, and the buffers, from `source`,
  // which must name each of a tied parameter's names, or one of them. Where
  // several ranks have the same elements, one of them reads.
  //
  // Collective. Errors: what `source` returns, or kInvalidArgument naming the
  // key and what is wrong with its shape or dtype, before anything has changed;
  // with from_rank0, before that parameter has. kAborted on ranks that had none
  // themselves.
  absl::Status load_full_state_dict(const TensorSource& source,
                                    const LoadOptions& options = {});

  // In module order. Valid until the next step.
  std::vector<LocalShard> local_shards() const;
  // Buffers and ignored parameters, the same on every rank, in the dtype that a
  // state dict has.
  std::vector<std::pair<std::string, at::Tensor>> whole_tensors() const;
  // Calls `fill` with every local shard whose turn it is, to write to its
  // values, and loads the whole tensors from `whole`; one that it returns
  // undefined stays as it is.
  //
  // Collective. Errors: the first one of `fill` or `whole`; kAborted on ranks
  // that had none themselves. The model may then be loaded in part.
  absl::Status load_local_shards(
      const std::function<absl::Status(const LocalShard& shard)>& fill,
      const TensorSource& whole);

  // --- inspection
  std::vector<UnitInfo> units() const;
  // What sharding this model costs; print table(). `optimizer_states`: tensors
  // that the optimizer keeps for each parameter.
  Plan plan(int optimizer_states = 2) const;
  MemoryUse memory_use() const;
  const ProcessGroups& groups() const;

  // For this library's optimizers.
  const std::shared_ptr<internal::ShardedState>& state() const {
    return state_;
  }

 protected:
  ShardedModule() = default;
  // Errors: as fully_shard.
  absl::Status shard(std::shared_ptr<torch::nn::Module> module,
                     const ProcessGroups& groups, const ShardOptions& options);

  // Opens a forward of the root for as long as it lives.
  class ForwardScope {
   public:
    explicit ForwardScope(const ShardedModule& sharded);
    ~ForwardScope() noexcept(false);
    ForwardScope(const ForwardScope&) = delete;
    ForwardScope& operator=(const ForwardScope&) = delete;

   private:
    std::shared_ptr<internal::ShardedState> state_;
    const int exceptions_;
  };
  // To which inputs and outputs of this forward are cast; unset: not at all.
  std::optional<at::ScalarType> input_dtype() const;
  std::optional<at::ScalarType> output_dtype() const;

 private:
  class Loader;
  void choose_precision() const;
  absl::Status load_from_rank0(const Loader& loader);

  std::shared_ptr<internal::ShardedState> state_;
  std::shared_ptr<internal::WholeTensors> whole_;
  std::shared_ptr<torch::nn::Module> module_;
};

// A sharded module of type M.
//
// Example:
//   auto sharded = fully_shard(model, groups, options);
//   auto loss = (*sharded)(inputs, targets);
//   loss.backward();
template <class M>
class FullyShardedModule final : public ShardedModule {
 public:
  const std::shared_ptr<M>& module() const { return module_; }
  M* operator->() const { return module_.get(); }

  // Calls module()->forward(args...) with floating inputs cast to the param
  // dtype and floating outputs to the output dtype.
  template <class... Args>
  auto operator()(Args&&... args) const {
    return call(
        [this](auto&&... a) {
          return module_->forward(std::forward<decltype(a)>(a)...);
        },
        std::forward<Args>(args)...);
  }

  // The same for another method, as call(&M::encode, x), or any callable.
  template <class Fn, class... Args>
  auto call(Fn&& fn, Args&&... args) const {
    if constexpr (std::is_member_pointer_v<std::decay_t<Fn>>) {
      return call(
          [this, fn](auto&&... a) {
            return std::invoke(fn, *module_, std::forward<decltype(a)>(a)...);
          },
          std::forward<Args>(args)...);
    } else {
      ForwardScope scope(*this);
      std::tuple<std::decay_t<Args>...> inputs(std::forward<Args>(args)...);
      cast_floating(inputs, input_dtype());
      using Result = decltype(std::apply(fn, std::move(inputs)));
      if constexpr (std::is_void_v<Result>) {
        std::apply(fn, std::move(inputs));
      } else {
        std::decay_t<Result> outputs = std::apply(fn, std::move(inputs));
        cast_floating(outputs, output_dtype());
        return outputs;
      }
    }
  }

  // Use fully_shard.
  static absl::StatusOr<FullyShardedModule> create(
      std::shared_ptr<M> module, const ProcessGroups& groups,
      const ShardOptions& options) {
    FullyShardedModule sharded;
    absl::Status status = sharded.shard(module, groups, options);
    if (!status.ok()) return status;
    sharded.module_ = std::move(module);
    return sharded;
  }

 private:
  FullyShardedModule() = default;

  std::shared_ptr<M> module_;
};

// Shards `module` in place: moves it to the rank's device and splits its
// parameters over the ranks, unit by unit, as `options` says. The module stays
// usable through all its methods; its parameters keep their identity, shape and
// names.
//
// Collective: all ranks, with modules and options that are alike.
// Errors: kInvalidArgument for options or modules that cannot be sharded.
template <class M>
absl::StatusOr<FullyShardedModule<M>> fully_shard(
    std::shared_ptr<M> module, const ProcessGroups& groups,
    const ShardOptions& options = {}) {
  return FullyShardedModule<M>::create(std::move(module), groups, options);
}

// The same for a module holder (TORCH_MODULE).
template <class M>
absl::StatusOr<FullyShardedModule<M>> fully_shard(
    const torch::nn::ModuleHolder<M>& module, const ProcessGroups& groups,
    const ShardOptions& options = {}) {
  return FullyShardedModule<M>::create(module.ptr(), groups, options);
}

}  // namespace fullshard

#endif  // FULLSHARD_SHARDING_FULLY_SHARD_H_
