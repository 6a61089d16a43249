#ifndef FULLSHARD_SHARDING_WHOLE_TENSORS_H_
#define FULLSHARD_SHARDING_WHOLE_TENSORS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "fullshard/core/process_groups.h"
#include "fullshard/sharding/shard_options.h"
#include "torch/nn/module.h"

namespace fullshard::internal {

// What a sharded module keeps whole on every rank: its buffers and the
// parameters that are ignored. They are only moved to the device and made equal
// on request; buffers are also cast to the buffer dtype. What was cast keeps
// its exact values beside it until forward changes it.
class WholeTensors {
 public:
  // Collective if options.sync_module_states.
  WholeTensors(torch::nn::Module& root, const ProcessGroups& groups,
               const ShardOptions& options);

  // Ignored parameters first.
  std::vector<std::string> names() const;
  // Each once, however many names it has.
  std::vector<at::Tensor> ignored_parameters() const;

  // Returns the tensor's values in its original dtype; undefined if there is
  // none of that name.
  at::Tensor value(const std::string& name) const;

  // Gives cast buffers their original dtype, or casts them again.
  void set_full_precision(bool value);

  // Errors: kInvalidArgument naming the tensor if the shape differs.
  absl::Status load(const std::string& name, const at::Tensor& values);

 private:
  struct Whole {
    std::string name;
    bool is_buffer = true;
    at::Tensor tensor;    // The module's own, maybe cast.
    at::Tensor original;  // Undefined if it was not cast.
    int64_t version = 0;  // Of `tensor` when `original` was taken.
  };

  void visit(torch::nn::Module& module, const std::string& prefix,
             const ShardOptions& options);

  std::vector<Whole> tensors_;
  std::optional<at::ScalarType> buffer_dtype_;
  bool full_precision_ = false;
};

}  // namespace fullshard::internal

#endif  // FULLSHARD_SHARDING_WHOLE_TENSORS_H_
