#ifndef FULLSHARD_TRAINING_PARAM_GROUPS_H_
#define FULLSHARD_TRAINING_PARAM_GROUPS_H_

#include <string>
#include <vector>

#include "fullshard/io/sharded_checkpoint_writer.h"
#include "fullshard/optim/sharded_optimizer.h"

namespace fullshard::internal {

// The optimizer's groups as Python's get_optimizer_state_dict has them,
// {optimizer_key: {"param_groups": [{"params": [name], "lr": ...}]}}, one value
// for each entry of each group.
std::vector<ObjectToSave> param_groups_to_save(
    const ShardedOptimizer& optimizer, const std::string& optimizer_key);

}  // namespace fullshard::internal

#endif  // FULLSHARD_TRAINING_PARAM_GROUPS_H_
