#ifndef FULLSHARD_OPTIM_OPTIMIZER_STATE_H_
#define FULLSHARD_OPTIM_OPTIMIZER_STATE_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fullshard/optim/sharded_optimizer.h"

namespace fullshard {

// The state of a whole optimizer in original shapes and names, as Python's
// FSDP.full_optim_state_dict and get_optimizer_state_dict(full_state_dict=True)
// give it: {"state": {name: {key: tensor}}, "param_groups": [...]}.
//
// A parameter that never had a gradient has no entry in `state`, except with
// Adagrad, as with torch.optim.
struct FullOptimizerState {
  struct Group {
    std::vector<std::string> params;
    OptimizerOptions options;  // lr, weight_decay and hyperparameters().
  };
  std::map<std::string, std::map<std::string, at::Tensor>> state;
  std::vector<Group> param_groups;
};

// Receives one tensor of the full state. The tensor is valid during the call.
using OptimizerStateSink = std::function<absl::Status(
    const std::string& name, const std::string& key, const at::Tensor&)>;

// Gathers one flat parameter's state tensor at a time and calls `sink` on rank
// 0, or with `all_ranks` on every rank, with each tensor in the parameter's
// original shape; `step` is a 0-dim float.
//
// Collective: returns on every rank when all are done. Errors: the first one of
// `sink`; kAborted on ranks that had none themselves; kUnavailable if a peer
// fails.
absl::Status stream_optimizer_state(const ShardedOptimizer& optimizer,
                                    const OptimizerStateSink& sink,
                                    bool all_ranks = false);
// The same as a whole, in host memory. `state` is empty where `sink` would not
// be called.
absl::StatusOr<FullOptimizerState> full_optimizer_state(
    const ShardedOptimizer& optimizer, bool all_ranks = false);

std::vector<FullOptimizerState::Group> optimizer_param_groups(
    const ShardedOptimizer& optimizer);

// Copies this rank's part of every state tensor, whatever number of ranks saved
// it. Names of tied parameters may be any of theirs. Rates and other
// hyperparameters stay as the optimizer's options and the schedule have them.
//
// No communication.
// Errors: kNotFound or kInvalidArgument naming the parameter, for tensors that
// are missing or of another shape, and for names that the model does not train;
// then nothing has changed.
absl::Status load_full_optimizer_state(const FullOptimizerState& state,
                                       ShardedOptimizer& optimizer);

}  // namespace fullshard

#endif  // FULLSHARD_OPTIM_OPTIMIZER_STATE_H_
