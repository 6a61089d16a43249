// This rank's own elements of every parameter, for sharded checkpoints.

#include <utility>

#include "ATen/ops/view_as_complex.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/catch_errors.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
#include "fullshard/core/watchdog.h"
#include "fullshard/sharding/fully_shard.h"
#include "fullshard/sharding/sharded_state.h"
#include "fullshard/sharding/whole_tensors.h"

namespace fullshard {
namespace {

using internal::FlatParameter;

LocalShard local_shard(const FlatParameter& flat, size_t index) {
  const auto& original = flat.parameters()[index];
  const ShardLayout::Range range =
      flat.layout().local_range(index, flat.placement().shard_rank);
  const int64_t width = flat.is_complex() ? 2 : 1;
  LocalShard shard;
  shard.name = original.name;
  shard.aliases = original.aliases;
  shard.sizes = original.tensor.sizes().vec();
  shard.order = memory_order(shard.sizes, flat.strides()[index]);
  shard.begin = range.parameter_offset / width;
  shard.values = flat.master_shard().narrow(0, range.shard_offset, range.numel);
  if (flat.is_complex()) {
    shard.values = at::view_as_complex(shard.values.view({range.numel / 2, 2}));
  }
  return shard;
}

// The ranks that hold the same elements. Of flat parameter number i, rank
// i % size of them saves and loads.
c10d::Backend& replicas(const internal::ShardedState& state) {
  const bool replicated =
      state.options().strategy == ShardingStrategy::kNoShard;
  return *(replicated ? state.groups().world()
                      : state.groups().replicate_group());
}

void broadcast_to_replicas(c10d::Backend& replicas, int root,
                           const FlatParameter& flat) {
  if (replicas.getSize() == 1) return;
  at::Tensor values = flat.master_shard();
  // An offloaded shard is where a backend may not reach it.
  const at::Tensor sent =
      flat.placement().offload
          ? values.to(flat.placement().device, values.scalar_type(),
                      /*non_blocking=*/false, /*copy=*/true)
          : values;
  std::vector<at::Tensor> bytes = {sent.view(at::kByte)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  CollectiveScope scope("broadcast of a load", &flat.name(), 0);
  replicas.broadcast(bytes, options)->wait();
  if (flat.placement().offload) values.copy_(sent);
}

}  // namespace

std::vector<LocalShard> ShardedModule::local_shards() const {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  c10d::Backend& group = replicas(*state_);
  std::vector<LocalShard> shards;
  int turn = 0;
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      const bool own_turn = turn++ % group.getSize() == group.getRank();
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        shards.push_back(local_shard(*flat, i));
        shards.back().own_turn = own_turn;
      }
    }
  }
  return shards;
}

std::vector<std::pair<std::string, at::Tensor>> ShardedModule::whole_tensors()
    const {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const std::string& name : whole_->names()) {
    tensors.emplace_back(name, whole_->value(name));
  }
  return tensors;
}

absl::Status ShardedModule::load_local_shards(
    const std::function<absl::Status(const LocalShard& shard)>& fill,
    const TensorSource& whole) {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  absl::Status status;
  c10d::Backend& group = replicas(*state_);
  return catch_errors("load", [&]() -> absl::Status {
    state_->begin_update();
    int turn = 0;
    for (const auto& unit : state_->units()) {
      for (const auto& flat : unit->flats) {
        const int reader = turn++ % group.getSize();
        const size_t num =
            reader == group.getRank() ? flat->parameters().size() : 0;
        for (size_t i = 0; status.ok() && i < num; ++i) {
          const LocalShard shard = local_shard(*flat, i);
          status = catch_errors(shard.name, [&] { return fill(shard); });
        }
        // Also after an error, which the others do not know of yet.
        broadcast_to_replicas(group, reader, *flat);
        flat->note_update();
      }
    }
    for (const std::string& name : whole_->names()) {
      if (!status.ok()) break;
      status = catch_errors(name, [&]() -> absl::Status {
        FS_ASSIGN_OR_RETURN(const at::Tensor value, whole(name));
        return value.defined() ? whole_->load(name, value) : absl::OkStatus();
      });
    }
    return agree(groups(), status, "load");
  });
}

}  // namespace fullshard
