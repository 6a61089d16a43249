#include "fullshard/sharding/gather_shards.h"

#include "ATen/ops/empty.h"
#include "fullshard/core/watchdog.h"

namespace fullshard::internal {

at::Tensor gather_shards(const FlatParameter& flat, const at::Tensor& shard,
                         c10d::Backend& group, const char* what) {
  if (group.getSize() == 1) return shard;
  at::Tensor full = at::empty({flat.layout().padded()}, shard.options());
  // Backends know bytes, not every dtype.
  at::Tensor full_bytes = full.view(at::kByte);
  at::Tensor own_bytes = shard.view(at::kByte);
  CollectiveScope scope(what, &flat.name(), 0);
  group._allgather_base(full_bytes, own_bytes)->wait();
  return full;
}

}  // namespace fullshard::internal
