#include "fullshard/sharding/gather_shards.h"

#include "ATen/ops/empty.h"
#include "fullshard/core/watchdog.h"

namespace fullshard::internal {

at::Tensor gather_shards(const FlatParameter& flat, const at::Tensor& shard,
                         c10d::Backend& group, const char* what) {
  // An offloaded shard is where a backend may not reach it.
  const at::Tensor own =
      flat.placement().offload
          ? shard.to(flat.placement().device, shard.scalar_type(),
                     /*non_blocking=*/false, /*copy=*/true)
          : shard;
  if (group.getSize() == 1) return own;
  at::Tensor full = at::empty({flat.layout().padded()}, own.options());
  // Backends know bytes, not every dtype.
  at::Tensor full_bytes = full.view(at::kByte);
  at::Tensor own_bytes = own.view(at::kByte);
  CollectiveScope scope(what, &flat.name(), 0);
  group._allgather_base(full_bytes, own_bytes)->wait();
  return full;
}

}  // namespace fullshard::internal
