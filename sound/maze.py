"""Walk a cellar with a torch: look where the doors are, find the chest, take it."""
import json, random
from sandbox.contract import Task, Score
def tool(n,d,**p):
    return {"type":"function","function":{"name":n,"description":d,"parameters":{"type":"object","properties":p,"required":list(p)}}}
def call(n,**a):
    return {"role":"assistant","content":None,"tool_calls":[{"id":"c1","type":"function","function":{"name":n,"arguments":json.dumps(a)}}]}
class Base:
    limit = 30
    def step(self,m):
        self.turn+=1; calls=m.get("tool_calls") or []
        if not calls: self.ended=True
        return [{"role":"tool","tool_call_id":c["id"],"content":json.dumps(self._safe(c["function"]))} for c in calls]
    def _safe(self,f):
        try:
            return self._do(f["name"],json.loads(f["arguments"]))
        except (KeyError,TypeError,ValueError,IndexError,AttributeError): return {"error":"no such tool, or arguments that do not fit"}
    @property
    def done(self): return self.ended or self.turn>=self.limit
    def score(self):
        return Score(1.0 if self.won else 0.0,self.won,{})

D={"north":(0,-1),"south":(0,1),"west":(-1,0),"east":(1,0)}
TOOLS=[tool("look","The doors of this room and what is in it."),tool("go","Through a door.",direction={"type":"string","enum":list(D)}),tool("take","Take a thing that is here.",thing={"type":"string"})]
class Environment(Base):
    limit=60
    def reset(self,seed):
        rng=random.Random(seed); self.turn=0; self.ended=self.won=False
        n=rng.choice([3,4]); self.doors={(0,0):{}}
        while len(self.doors)<n*n:
            x,y=rng.choice(list(self.doors)); w=rng.choice(list(D)); p=(x+D[w][0],y+D[w][1])
            if p in self.doors or not(0<=p[0]<n and 0<=p[1]<n): continue
            back={"north":"south","south":"north","west":"east","east":"west"}[w]
            self.doors[(x,y)][w]=p; self.doors[p]={back:(x,y)}
        self.at=(0,0); self.thing=rng.choice(["chest","crown","lamp","map"]); self.where=rng.choice([p for p in self.doors if p!=(0,0)])
        t=rng.choice(["Somewhere down there is the {}. Fetch it.","Bring me the {}!","Find the {} in the cellar.","They say a {} is hidden here; take it.","Your task: the {}."]).format(self.thing)
        return Task("You explore a cellar.",[{"role":"user","content":t}],TOOLS)
    def _do(self,name,a):
        if name=="look" and not a: return {"doors":sorted(self.doors[self.at]),"here":[self.thing] if self.at==self.where else []}
        if name=="go" and set(a)=={"direction"}: self.at=self.doors[self.at][a["direction"]]; return {"doors":sorted(self.doors[self.at]),"here":[self.thing] if self.at==self.where else []}
        if name=="take" and set(a)=={"thing"} and a["thing"]==self.thing and self.at==self.where: self.won=self.ended=True; return {"taken":self.thing}
        raise ValueError
    def oracle(self):
        yield call("look")
        seen={self.at}; path=[]
        back={"north":"south","south":"north","west":"east","east":"west"}
        while self.at!=self.where:
            ways=[w for w,p in sorted(self.doors[self.at].items()) if p not in seen]
            if ways: w=ways[0]; path.append(w); seen.add(self.doors[self.at][w]); yield call("go",direction=w)
            else: yield call("go",direction=back[path.pop()])
        yield call("take",thing=self.thing)
