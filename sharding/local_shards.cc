// This rank's own elements of every parameter, for sharded checkpoints.

#include <utility>

#include "ATen/ops/view_as_complex.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "fullshard/core/max_over_ranks.h"
#include "fullshard/core/memory_order.h"
#include "fullshard/core/status.h"
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

}  // namespace

std::vector<LocalShard> ShardedModule::local_shards() const {
  c10::InferenceMode ordinary_tensors(false);
  at::NoGradGuard no_grad;
  const bool replicated =
      state_->options().strategy == ShardingStrategy::kNoShard;
  const auto& replicas =
      replicated ? groups().world() : groups().replicate_group();
  std::vector<LocalShard> shards;
  int turn = 0;
  for (const auto& unit : state_->units()) {
    for (const auto& flat : unit->flats) {
      const bool own_turn = turn++ % replicas->getSize() == replicas->getRank();
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
  try {
    state_->begin_update();
    for (const auto& unit : state_->units()) {
      for (const auto& flat : unit->flats) {
        for (size_t i = 0; status.ok() && i < flat->parameters().size(); ++i) {
          status = fill(local_shard(*flat, i));
        }
        flat->note_update();
      }
    }
    for (const std::string& name : whole_->names()) {
      if (!status.ok()) break;
      absl::StatusOr<at::Tensor> value = whole(name);
      status = value.ok() ? whole_->load(name, *value) : value.status();
    }
    const int64_t failed = max_over_ranks(groups(), status.ok() ? 0 : 1,
                                          "all_reduce of a load's end");
    if (status.ok() && failed != 0) {
      status =
          absl::AbortedError("load failed on another rank; see its message");
    }
  } catch (const c10::Error& error) {
    return absl::UnavailableError(
        absl::StrCat("load: ", error.what_without_backtrace()));
  }
  return status;
}

}  // namespace fullshard
