#include "fullshard/optim/shard_runs.h"

#include "ATen/ops/empty_strided.h"
#include "ATen/ops/view_as_real.h"
#include "absl/strings/str_cat.h"
#include "fullshard/core/max_over_ranks.h"

namespace fullshard::internal {

std::vector<ShardRun> split_shard(const FlatParameter& flat,
                                  const std::vector<size_t>& keys) {
  std::vector<ShardRun> runs;
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const ShardLayout::Range range =
        flat.layout().local_range(i, flat.placement().shard_rank);
    if (range.numel == 0) continue;
    if (!runs.empty()) {
      runs.back().end = range.shard_offset;
      if (runs.back().key == keys[i]) continue;
    }
    runs.push_back({range.shard_offset, 0, keys[i]});
  }
  if (!runs.empty()) runs.back().end = flat.layout().chunk;
  return runs;
}

std::vector<FlatParameter*> trainable_flats(const ShardedState& state) {
  std::vector<FlatParameter*> flats;
  for (const auto& unit : state.units()) {
    for (const auto& flat : unit->flats) {
      if (flat->placement().trainable) flats.push_back(flat.get());
    }
  }
  return flats;
}

at::Tensor local_part(const FlatParameter& flat, size_t index,
                      const at::Tensor& full) {
  const ShardLayout::Range range =
      flat.layout().local_range(index, flat.placement().shard_rank);
  at::Tensor source = full;
  if (source.strides() != flat.strides()[index]) {
    source =
        at::empty_strided(full.sizes(), flat.strides()[index], full.options())
            .copy_(full);
  }
  at::Tensor elements =
      source.as_strided({source.numel()}, {1}, source.storage_offset());
  if (elements.is_complex()) elements = at::view_as_real(elements).view({-1});
  return elements.narrow(0, range.parameter_offset, range.numel);
}

void copy_local_part(const FlatParameter& flat, size_t index,
                     const at::Tensor& full, const at::Tensor& shard) {
  const ShardLayout::Range range =
      flat.layout().local_range(index, flat.placement().shard_rank);
  shard.narrow(0, range.shard_offset, range.numel)
      .copy_(local_part(flat, index, full));
}

absl::Status agree(const ShardedState& state, const absl::Status& own,
                   const char* what) {
  const int64_t failed = max_over_ranks(state.groups(), own.ok() ? 0 : 1, what);
  if (own.ok() && failed != 0) {
    return absl::AbortedError(
        absl::StrCat(what, " failed on another rank; see its message"));
  }
  return own;
}

}  // namespace fullshard::internal
