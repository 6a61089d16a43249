#ifndef FULLSHARD_SHARDING_MODULE_BUFFERS_H_
#define FULLSHARD_SHARDING_MODULE_BUFFERS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/sharding/shard_options.h"
#include "torch/nn/module.h"

namespace fullshard::internal {

// The buffers of a sharded module: they are not split, only moved to the
// device, made equal on request, and cast to the buffer dtype. What was cast
// keeps its exact values beside it until forward changes it.
class ModuleBuffers {
 public:
  // Collective if options.sync_module_states.
  ModuleBuffers(torch::nn::Module& root, const ProcessGroups& groups,
                const ShardOptions& options);

  std::vector<std::string> names() const;

  // Returns the buffer's values in its original dtype; undefined if there is
  // no buffer of that name.
  at::Tensor value(const std::string& name) const;

  // Errors: kInvalidArgument naming the buffer if the shape differs.
  absl::Status load(const std::string& name, const at::Tensor& values);

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;    // The module's own, maybe cast.
    at::Tensor original;  // Undefined if it was not cast.
    int64_t version = 0;  // Of `tensor` when `original` was taken.
  };

  void visit(torch::nn::Module& module, const std::string& prefix,
             const MixedPrecision& policy);

  std::vector<Buffer> buffers_;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_MODULE_BUFFERS_H_
